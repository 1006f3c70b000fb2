"""Programs and compile seconds against the number of buckets and of stages, cold and from the compilation cache.

Every case is a process of its own, `python -m tables.programs BUCKETS STAGES FOLDER [--quick]`, which prints a line of
JSON: what is compiled once in a process is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import optax

import mp_lstm
from mp_lstm.launch import enable_compilation_cache
from tables.kit import Series, draw, lines, markdown, prose, together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS = (8, 12, 16, 24, 32, 40, 48, 64)
SIZES: dict[str, Any] = {"vocab": 2_000, "embed": 256, "hidden": 256, "layers": 4}
TINY: dict[str, Any] = {"vocab": 50, "embed": 4, "hidden": 4, "layers": 2}
BUCKETS, STAGES = (1, 2, 4, 8), (1, 2, 4)
BASE_BUCKETS, BASE_STAGES = 4, 2
ROWS = 20


class Compiled(NamedTuple):
    """What a warm-up made: programs, the most there can be, and the seconds it took."""

    programs: int
    bound: int
    seconds: float


class Case(NamedTuple):
    """A number of buckets and of stages, compiled cold and then warm."""

    buckets: int
    stages: int
    cold: Compiled
    warm: Compiled


def warm_up(buckets: int, stages: int, quick: bool) -> Compiled:
    """Compiles all programs of a pipeline in this process."""
    mp_lstm.emulate_devices(max(STAGES))
    model = mp_lstm.language_model(**(TINY if quick else SIZES))
    lengths = LENGTHS[-buckets:]
    plan = mp_lstm.make_plan(model, batch_size=ROWS, lengths=lengths, devices=jax.devices(), stages=stages)
    pipe = mp_lstm.make_pipeline(model, plan, optax.adam(1e-3), max_norm=5.0)
    began = time.perf_counter()
    pipe.warm_up()
    seconds = time.perf_counter() - began
    report = pipe.programs.report()
    return Compiled(report.programs, report.bound, seconds)


def measure(buckets: int, stages: int, *, quick: bool) -> Case:
    """Compiles in a new process with an empty cache, then in another with what the first one left there."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tables.programs", str(buckets), str(stages), folder]
        command += ["--quick"] if quick else []
        runs = [
            subprocess.run(command, cwd=Path(__file__).parents[1], check=True, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
    return Case(buckets, stages, *(Compiled(**json.loads(run.stdout)) for run in runs))


def cases(*, quick: bool) -> list[tuple[int, int]]:
    """Numbers of buckets and stages: each along its axis."""
    if quick:
        return [(1, 2), (2, 2), (2, 1)]
    wanted = [(count, BASE_STAGES) for count in BUCKETS] + [(BASE_BUCKETS, count) for count in STAGES]
    return list(dict.fromkeys(wanted))


def table(picture: Path, *, quick: bool) -> str:
    """Measures, draws, and says what it shows."""
    found = [measure(*case, quick=quick) for case in cases(quick=quick)]
    rows = [
        (case.buckets, case.stages, cold.programs, cold.bound, f"{cold.seconds:.1f}", f"{warm.seconds:.1f}")
        for case in found
        for cold, warm in ((case.cold, case.warm),)
    ]
    base = max(case.buckets for case in found if case.stages == 1)

    def panel(axes: Axes, what: str) -> None:
        part = [case for case in found if (case.stages == BASE_STAGES if what == "buckets" else case.buckets == base)]
        part.sort(key=lambda case: getattr(case, what))
        x = [getattr(case, what) for case in part]
        series = [Series("cold", x, [case.cold.seconds for case in part])]
        series.append(Series("warm", x, [case.warm.seconds for case in part]))
        lines(axes, series, what, "seconds")
        axes.set_ylim(bottom=0)

    head = ["buckets", "stages", "programs", "at most", "cold, s", "warm, s"]
    sizes = TINY if quick else SIZES
    return together(
        prose(
            f"`pipe.warm_up()` of a model of {sizes['layers']} layers of {sizes['hidden']}, vocabulary",
            f"{sizes['vocab']:,}, {ROWS} rows, Adam; of the lengths {', '.join(map(str, LENGTHS))} the longest ones.",
            "Each in a new process: cold with an empty compilation cache on disk, warm with the one that the cold run",
            "left. Buckets share programs where their chunks have one length.",
        ),
        markdown(head, rows),
        draw(picture, [lambda axes: panel(axes, "buckets"), lambda axes: panel(axes, "stages")]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles one case in this process."""
    parser = argparse.ArgumentParser(description="Compiles the programs of one pipeline.")
    parser.add_argument("buckets", type=int, help="number of buckets")
    parser.add_argument("stages", type=int, help="number of stages")
    parser.add_argument("folder", type=Path, help="of the compilation cache")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    args = parser.parse_args(argv)
    enable_compilation_cache(args.folder)
    print(json.dumps(warm_up(args.buckets, args.stages, args.quick)._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
