#!/usr/bin/env python
"""Holds predicted memory to what JAX holds: peak bytes of each device, for every schedule, with and without remat.

    python scripts/memory.py [--presets mxnet,medium,large] [--out FILE.md]

The rows of a preset are measured alone, a plan's peaks are predicted from them, and only then its step runs, watched
task by task (`mp_lstm.runtime.memory.live_bytes`). The exit status is 1 if a prediction is off by more than 10%. Times
play no part in it, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

import mp_lstm
from mp_lstm.launch import enable_compilation_cache
from mp_lstm.planning.plan import Plan, Remat
from mp_lstm.runtime.memory import live_bytes
from presets import NAMES, Preset, load_preset, random_batch

CACHE = Path(".cache/memory")  # not where measured plans look: times of one repetition on a busy machine mean nothing
LIMIT = 0.10
PARTITIONS = {"mxnet": (6, 4), "medium": (3, 1), "large": (3, 3)}
SCHEDULES = ("serial", "wavefront", "gpipe", "one_f_one_b")
REMATS: tuple[Remat, ...] = ("none", "head", "layer")
CHUNKS, MICROBATCHES = 4, 4


class Checked(NamedTuple):
    """A plan's peak on one of its devices, in bytes."""

    preset: str
    schedule: str
    remat: str
    device: int
    predicted: int
    held: int

    @property
    def difference(self) -> float:
        """Of the prediction, relative to what was held."""
        return self.predicted / self.held - 1


def cut(schedule: str, length: int) -> dict[str, Any]:
    """How a schedule cuts its batches here: wavefront by time, gpipe and 1F1B by rows, serial not at all."""
    if schedule == "serial":
        return {}
    if schedule == "wavefront":
        return {"chunk": length // CHUNKS, "microbatches": 1}
    return {"chunk": length, "microbatches": MICROBATCHES}


def plans(name: str, preset: Preset, costs: mp_lstm.CostModel) -> Iterator[Plan]:
    """Every schedule with every remat."""
    for schedule in SCHEDULES:
        for remat in REMATS:
            yield mp_lstm.make_plan(
                preset.model,
                batch_size=preset.batch_size,
                lengths=preset.lengths,
                devices=jax.devices()[:2],
                partition=PARTITIONS[name],
                schedule=schedule,
                remat=remat,
                costs=costs,
                **cut(schedule, preset.lengths[0]),
            )


def check(name: str) -> Iterator[Checked]:
    """Predicts the peaks of a preset's plans, and runs a step of each."""
    preset, optimizer = load_preset(name), optax.sgd(0.1)
    costs = mp_lstm.measure_costs(
        preset.model,
        preset.batch_size,
        preset.lengths,
        jax.devices()[:2],
        microbatches=(1, MICROBATCHES),
        optimizer=optimizer,
        remat=None,
        cache_dir=CACHE,
        repeats=1,
    )
    for plan in plans(name, preset, costs):
        predicted = mp_lstm.predicted_memory(plan, preset.model, costs)
        pipe = mp_lstm.make_pipeline(preset.model, plan, optimizer, max_norm=5.0)
        _, held = live_bytes(pipe, pipe.init(jax.random.key(0)), random_batch(preset))
        for device, nbytes in predicted.items():
            yield Checked(name, plan.schedule_name, plan.remat, device, nbytes, held[device])


def largest(found: Sequence[Checked]) -> Checked:
    """The one whose prediction is farthest off."""
    return max(found, key=lambda checked: abs(checked.difference))


def table(found: Sequence[Checked]) -> str:
    """All of them, and the largest difference."""
    lines = [
        "| preset | schedule | remat | device | predicted, MB | held, MB | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for checked in found:
        predicted, held = (f"{nbytes / 1e6:.1f}" for nbytes in (checked.predicted, checked.held))
        place = f"{checked.preset} | {checked.schedule} | {checked.remat} | {checked.device}"
        lines.append(f"| {place} | {predicted} | {held} | {checked.difference:+.1%} |")
    worst = largest(found)
    where = f"{worst.preset}, {worst.schedule}, remat {worst.remat}, device {worst.device}"
    return "\n".join([*lines, "", f"The largest difference is {worst.difference:+.1%} ({where})."])


def page(presets: str, found: Sequence[Checked]) -> str:
    """The table as a page of its own."""
    text = (
        f"`python scripts/memory.py --presets {presets}`: the most bytes that each of two devices needs during a step "
        "of plain SGD, predicted from rows measured alone, and held: the arrays alive after each task is enqueued, and "
        f"the temporaries of its program. wavefront cuts time into {CHUNKS} chunks, gpipe and one_f_one_b rows into "
        f"{MICROBATCHES} micro-batches."
    )
    return f"# Predicted and held memory\n\n{textwrap.fill(text, 120)}\n\n{table(found)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the presets asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--presets", default=",".join(NAMES), help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there too")
    args = parser.parse_args(argv)
    names = args.presets.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--presets: {unknown[0]} is unknown, of {', '.join(NAMES)} are wanted")
    if args.out and (args.out.is_dir() or not args.out.parent.is_dir()):
        parser.error(
            f"--out: {args.out} is no file in a directory that is there: pass such as docs/benchmarks/memory.md"
        )
    mp_lstm.emulate_devices(2)
    enable_compilation_cache()
    found: list[Checked] = []
    for name in names:
        for checked in check(name):
            found.append(checked)
            print(*checked, f"{checked.difference:+.1%}", flush=True)
    print(f"\n{table(found)}")
    if args.out:
        args.out.write_text(page(args.presets, found), encoding="utf-8")
    return 0 if abs(largest(found).difference) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
