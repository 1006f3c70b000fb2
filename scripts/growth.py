#!/usr/bin/env python
"""How cost grows: step time, buckets, programs, memory, dispatch, devices, each a table and a picture.

    python scripts/growth.py [--tables steps,buckets,compile,memory,dispatch,scaling] [--out docs/benchmarks] [--quick]

Writes growth.md and growth-NAME.png. Tables that are not asked for stay in the page as they are. A busy machine is
warned of: times taken on one mean nothing. `--quick` runs everything at tiny sizes: it shows that it works, no more.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import mp_lstm
from mp_lstm.launch import enable_compilation_cache, set_allocator
from presets import warn_if_busy
from tables import buckets, dispatch, memory, programs, scaling, steps

TABLES = {
    "steps": ("Step time against T, B, H and L", steps.table),
    "buckets": ("Real tokens a second against buckets", buckets.table),
    "compile": ("Programs and compile time against buckets and stages", programs.table),
    "memory": ("Peak memory against stages", memory.table),
    "dispatch": ("Dispatch", dispatch.table),
    "scaling": ("Devices, simulated", scaling.table),
}
HEAD = """# Cost as work grows

Written by `scripts/growth.py`. Times are of one run on one machine: what counts is how they compare."""


def sections(page: str) -> dict[str, str]:
    """The sections of a page, by their titles."""
    parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)[1:]
    return {title: body.strip() for title, body in zip(parts[::2], parts[1::2], strict=True)}


def merged(page: str, new: Mapping[str, str]) -> str:
    """The page with new sections in the place of old ones of the same title, in the order of the tables."""
    bodies = sections(page) | dict(new)
    shown = [f"## {title}\n\n{bodies[title]}" for title, _ in TABLES.values() if title in bodies]
    return "\n\n".join([HEAD, *shown]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the tables asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", default=",".join(TABLES), help=f"of {', '.join(TABLES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder; default: docs/benchmarks")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    args = parser.parse_args(argv)
    names = args.tables.split(",")
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"--tables: {unknown[0]} is unknown, of {', '.join(TABLES)} are wanted")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} is no folder and cannot be made one ({error.strerror})")
    set_allocator()
    enable_compilation_cache()
    mp_lstm.emulate_devices(4)
    page = args.out / "growth.md"
    for name in names:
        title, table = TABLES[name]
        load = warn_if_busy()
        body = table(args.out / f"growth-{name}.png", quick=args.quick)
        command = f"python scripts/growth.py --tables {name}{' --quick' if args.quick else ''}"
        body = f"`{command}`, load average before {load:.1f}.\n\n{body}"
        print(f"## {title}\n\n{body}\n", flush=True)
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        page.write_text(merged(before, {title: body}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
