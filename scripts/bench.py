#!/usr/bin/env python
"""Times training steps: of this project against other libraries, or of one model placed in several ways.

    python scripts/bench.py --peers torch,flax [--presets mxnet,medium,large] [--rounds 15] [--json FILE]
    python scripts/bench.py [--presets mxnet,medium,large,austen,partitions] [--rounds 15] [--json FILE]

With --peers every contender is a process of its own (contest.py); "none" times ours alone. One table a preset, with the
ratios that must not grow and their floors; scripts/guard.py compares a file with the ratios that are stored. Without
--peers the variants of variants.py run in one process. A busy machine is warned of: numbers taken on one mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import contest
import mp_lstm
import variants
from machine import busy_cores, warn_of_others
from mp_lstm.launch import set_allocator
from presets import NAMES, load_contest, warn_if_busy
from ratios import ratios, report

LIBRARIES = ("jax", "flax", "torch")


def versions() -> dict[str, str]:
    """Versions of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def run_contests(
    names: Sequence[str], peers: Sequence[str], options: dict[str, Any], rounds: int
) -> tuple[dict[str, Any], int]:
    """A contest for every preset, printed as soon as it is over; ends with the first that fails, and status 1."""
    results = {}
    for name in names:
        shape, plan, unroll = load_contest(name)
        try:
            result = contest.hold(shape, peers, plan | options, rounds=rounds, unroll=unroll)
        except RuntimeError as error:
            print(f"bench: {name}: {error}", file=sys.stderr)
            return results, 1
        results[name] = result | {"ratios": ratios(name, result)}
        print(report(name, results[name]), end="\n\n\n", flush=True)
    return results, 0


def run_variants(names: Sequence[str], rounds: int) -> dict[str, Any]:
    """The variants of every preset, in this process."""
    set_allocator()
    mp_lstm.emulate_devices(3)
    results = {}
    for name in names:
        found = variants.run(name, rounds)
        results[name] = [result._asdict() for result in found]
        print(variants.table(name, found), end="\n\n", flush=True)
    return results


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", help=f"of {', '.join(contest.PEERS)}, or none: hold a contest; default: variants")
    parser.add_argument("--presets", help=f"of {', '.join(variants.PRESETS)} (a contest: {', '.join(NAMES)}); all")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; default: 15")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's seconds too")
    parser.add_argument(
        "--options", default="{}", metavar="JSON", help="of make_plan for two devices: '{\"partition\": [6, 4]}'"
    )
    args = parser.parse_args(argv)
    possible = variants.PRESETS if args.peers is None else NAMES
    args.presets = args.presets.split(",") if args.presets else list(possible)
    args.peers = args.peers if args.peers is None else [peer for peer in args.peers.split(",") if peer != "none"]
    for option, given, known in (("presets", args.presets, possible), ("peers", args.peers or [], contest.PEERS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{option}: {unknown[0]} is unknown, of {', '.join(known)} are wanted")
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, at least 1 is wanted")
    try:
        args.options = json.loads(args.options)
    except json.JSONDecodeError as error:
        parser.error(f"--options is no JSON: {error}")
    if not isinstance(args.options, dict):
        parser.error("--options: names with their values are wanted, as in '{\"partition\": [6, 4]}'")
    if args.options and args.peers is None:
        parser.error("--options are for a contest: pass --peers too, or leave them out")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json} cannot be written: pass a file in a directory that is there")
    if args.peers is not None and (sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2):
        parser.error("--peers: contenders are pinned to two cores, which takes Linux and two cores")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the presets asked for."""
    args = parse(argv)
    if args.peers is None:
        about = {"load": warn_if_busy()}
        results, status = run_variants(args.presets, args.rounds), 0
    else:
        about = {"busy": busy_cores()}
        warn_of_others(about["busy"], "before the start")
        results, status = run_contests(args.presets, args.peers, args.options, args.rounds)
    if args.json:
        machine = {"cores": os.cpu_count(), "versions": versions()}
        args.json.write_text(json.dumps(machine | about | {"results": results}, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
