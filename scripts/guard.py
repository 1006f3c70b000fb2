#!/usr/bin/env python
"""Fails when a ratio of a benchmark has become more than 10% worse than the stored one.

    python scripts/bench.py --peers torch,flax --json FILE.json
    python scripts/guard.py FILE.json [--stored docs/benchmarks/ratios.json] [--write]

Ratios (seconds of ours over seconds of another, lower is better) are compared, never times: those are the machine's.
Exit status: 0 nothing is worse, 1 something is, one line each; 2 there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[1] / "docs" / "benchmarks" / "ratios.json"
SLACK = 0.10

Ratios = dict[str, dict[str, float]]


def ratios_of(run: Mapping[str, Any]) -> Ratios:
    """Preset -> name -> ratio of a file of `bench.py --peers`."""
    return {
        preset: {name: float(entry["ratio"]) for name, entry in result["ratios"].items()}
        for preset, result in run["results"].items()
        if isinstance(result, dict) and "ratios" in result
    }


def stored_ratios(path: Path) -> Ratios:
    """Preset -> name -> ratio of the stored file, all above 0; none where there is no file."""
    stored: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    ratios = {preset: {name: float(ratio) for name, ratio in row.items()} for preset, row in stored.items()}
    if wrong := [name for row in ratios.values() for name, ratio in row.items() if not ratio > 0]:
        raise ValueError(f"{wrong[0]} is not above 0")
    return ratios


def compare(found: Ratios, stored: Ratios) -> tuple[list[str], int]:
    """A line for every ratio that is more than 10% worse, and how many were compared."""
    pairs = [
        (f"{preset}: {name}", ratio, stored[preset][name])
        for preset, row in found.items()
        for name, ratio in row.items()
        if name in stored.get(preset, {})
    ]
    worse = [
        f"{name}: {ratio:.3f}, stored is {before:.3f} ({ratio / before - 1:+.0%})"
        for name, ratio, before in pairs
        if not ratio <= before * (1 + SLACK)
    ]
    return worse, len(pairs)


def merged(found: Ratios, stored: Ratios) -> Ratios:
    """The stored ratios with those found in their place; presets and rows that were not run stay."""
    return stored | {
        preset: stored.get(preset, {}) | {name: round(ratio, 4) for name, ratio in row.items()}
        for preset, row in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compares, or stores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="what `bench.py --peers ... --json FILE` wrote")
    parser.add_argument("--stored", type=Path, default=STORED, metavar="FILE", help=f"default: {STORED.name}")
    parser.add_argument("--write", action="store_true", help="store the ratios instead")
    args = parser.parse_args(argv)
    try:
        found = ratios_of(json.loads(args.file.read_text()))
        stored = stored_ratios(args.stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"cannot read the ratios: {error!r}; a file of `bench.py --peers ... --json FILE` is wanted")
    if args.write and found:
        try:
            args.stored.write_text(json.dumps(merged(found, stored), indent=1, sort_keys=True) + "\n")
        except OSError as error:
            parser.error(f"--stored {args.stored} cannot be written ({error.strerror})")
        return 0
    worse, compared = compare(found, stored)
    if not compared:
        parser.error(f"{args.file} and {args.stored} have no ratio in common: --write stores those of the first")
    print("\n".join([*worse, f"{compared} ratios compared, {len(worse)} more than {SLACK:.0%} worse"]))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
