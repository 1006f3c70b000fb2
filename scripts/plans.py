#!/usr/bin/env python
"""Holds the planner to what it says: predicted against measured step times, and its choice against all others.

    python scripts/plans.py predict [--presets mxnet,medium,large] [--plans 20] [--seed 0] [--out FILE.md]
    python scripts/plans.py choose  [--presets mxnet,medium,large] [--whole] [--out FILE.md]

`predict` measures the costs of single layers, predicts the plan that is chosen and random ones from them, and only then
runs them. `choose` runs every partition x chunk in {4, 8, 16, T} x schedule on two devices, times the best five and the
planner's choice again in pairs, and says how far the choice is from the best. Both write a table.

With its rows in one micro-batch a batch has the same timetable under every schedule but `serial`, so `choose` runs the
others with two, or with `--whole` not at all.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

import mp_lstm
from mp_lstm.launch import enable_compilation_cache, set_allocator
from mp_lstm.planning.plan import Plan
from presets import NAMES, Preset, load_preset, random_batch, seconds_of_round, warn_if_busy

CACHE = Path(".cache/costs")
MICROBATCHES = (1, 2, 4)
CHUNKS = (4, 8, 16)
FAR = 1.25  # times the least measured seconds: beyond it one step is enough to rule a plan out


class Timed(NamedTuple):
    """A plan with its predicted and measured seconds."""

    plan: Plan
    predicted: float
    measured: float


class Runner(NamedTuple):
    """A warmed-up pipeline with its state and its one window."""

    pipe: mp_lstm.Pipeline
    state: mp_lstm.State
    window: Any


def start(preset: Preset, plan: Plan) -> Runner:
    """Compiles a plan's programs, places a batch, and runs two steps."""
    pipe = mp_lstm.make_pipeline(preset.model, plan, optax.sgd(0.1), max_norm=5.0)
    batch = random_batch(preset)
    pipe.warm_up([batch])
    runner = Runner(pipe, pipe.init(jax.random.key(0)), pipe.place(batch))
    return advance(advance(runner)[0])[0]


def advance(runner: Runner) -> tuple[Runner, float]:
    """One step; the runner after it, and its seconds."""
    state, seconds = seconds_of_round(runner.pipe, runner.state, [runner.window])
    return runner._replace(state=state), seconds


def trial(preset: Preset, plan: Plan, best: float) -> float:
    """Seconds of a step: the median of three, or the first alone where it is far from the best known."""
    runner, seconds = start(preset, plan), []
    for _ in range(3):
        runner, time = advance(runner)
        seconds.append(time)
        if seconds[0] > FAR * best:
            break
    return statistics.median(seconds)


def in_pairs(preset: Preset, plans: Sequence[Plan], rounds: int) -> list[float]:
    """Median seconds of several plans, timed in turn."""
    runners = [start(preset, plan) for plan in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    for _ in range(rounds):
        for i, runner in enumerate(runners):
            runners[i], time = advance(runner)
            seconds[i].append(time)
    return [statistics.median(times) for times in seconds]


def options_of(preset: Preset) -> dict[str, Any]:
    """What every plan of a preset shares."""
    return {"batch_size": preset.batch_size, "lengths": preset.lengths, "devices": jax.devices()[:2]}


def splits(rows: int) -> list[tuple[int, int]]:
    """All partitions into two stages."""
    return [(first, rows - first) for first in range(1, rows)]


def random_plans(preset: Preset, count: int, seed: int, **options: Any) -> list[Plan]:
    """Plans drawn at random, all different."""
    draw, plans = random.Random(seed), []
    seen = set()
    while len(plans) < count:
        partition = draw.choice(splits(len(preset.model.rows)))
        schedule = draw.choice(sorted(mp_lstm.SCHEDULES))
        chosen: dict[str, Any] = {"partition": partition, "schedule": schedule}
        if schedule != "serial":
            chosen["chunk"] = draw.choice([*CHUNKS, preset.lengths[0]])
            chosen["microbatches"] = draw.choice(MICROBATCHES)
        if (key := tuple(chosen.items())) not in seen:
            seen.add(key)
            plans.append(mp_lstm.make_plan(preset.model, **options_of(preset), **chosen, **options))
    return plans


def all_plans(preset: Preset, *, whole: bool, **options: Any) -> list[Plan]:
    """Every partition x chunk x schedule, each timetable once; `whole`: those of one micro-batch alone."""
    length = preset.lengths[0]
    chunks = sorted({*CHUNKS, length})
    cuts: list[tuple[str, int | None, int]] = [("serial", None, 1)]
    cuts += [("wavefront", chunk, 1) for chunk in chunks]
    others = [] if whole else [name for name in sorted(mp_lstm.SCHEDULES) if name != "serial"]
    cuts += [(name, chunk, 2) for name in others for chunk in chunks]
    plans: dict[Any, Plan] = {}
    for partition, (schedule, chunk, microbatches) in itertools.product(splits(len(preset.model.rows)), cuts):
        chosen = {"partition": partition, "schedule": schedule, "chunk": chunk, "microbatches": microbatches}
        plan = mp_lstm.make_plan(preset.model, **options_of(preset), **chosen, **options)
        plans.setdefault((partition, plan.buckets[length], plan.schedule((length,)).tasks), plan)
    return list(plans.values())


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    (bucket,) = plan.buckets.values()
    cut = f"{bucket.chunks} x {bucket.chunk} steps, {bucket.microbatches} micro-batches"
    return f"{'+'.join(map(str, plan.partition))} {plan.schedule_name}, {cut}"


def costs_of(preset: Preset) -> Any:
    """Measured costs of a preset's layers, from the cache where they are there."""
    return mp_lstm.measure_costs(
        preset.model,
        preset.batch_size,
        preset.lengths,
        jax.devices()[:2],
        microbatches=MICROBATCHES,
        optimizer=optax.sgd(0.1),
        cache_dir=CACHE,
    )


def predict(name: str, count: int, seed: int) -> str:
    """The table of predicted and measured times of one preset.

    The machine's speed may change on the way, so the chosen plan runs in turn with each of the others: an error is that
    of the plan's time at the speed at which the chosen one was measured first, right after the costs.
    """
    preset = load_preset(name)
    costs = costs_of(preset)
    chosen = mp_lstm.make_plan(preset.model, **options_of(preset), costs=costs)
    plans = [chosen, *random_plans(preset, count, seed, costs=costs)]
    predicted = [mp_lstm.predict(plan, preset.model, costs, preset.lengths[0]).makespan for plan in plans]
    lines = [
        f"## {name}\n",
        "| plan | predicted, ms | measured, ms | the chosen one meanwhile, ms | error |",
        "|---|---|---|---|---|",
    ]
    errors, (first,) = [], in_pairs(preset, [chosen], 7)
    for plan, seconds in zip(plans, predicted, strict=True):
        meanwhile, measured = (first, first) if plan is chosen else in_pairs(preset, [chosen, plan], 3)
        errors.append(seconds / (measured * first / meanwhile) - 1)
        mark = " (chosen)" if plan is chosen else ""
        times = " | ".join(f"{time * 1e3:.1f}" for time in (seconds, measured, meanwhile))
        lines.append(f"| {describe(plan)}{mark} | {times} | {errors[-1]:+.1%} |")
        print(lines[-1], flush=True)
    within = sum(abs(error) <= 0.15 for error in errors)
    lines.append(f"\n{within} of {len(errors)} within 15%; the largest error is {max(errors, key=abs):+.1%}.")
    return "\n".join(lines)


def choose(name: str, *, whole: bool) -> str:
    """The table of all plans of one preset, and how far the chosen one is from the best."""
    preset = load_preset(name)
    costs = costs_of(preset)
    chosen = mp_lstm.make_plan(preset.model, **options_of(preset), costs=costs)
    found = []
    for plan in all_plans(preset, whole=whole, costs=costs):
        predicted = mp_lstm.predict(plan, preset.model, costs, preset.lengths[0]).makespan
        found.append(Timed(plan, predicted, trial(preset, plan, min((t.measured for t in found), default=math.inf))))
        print(f"{describe(plan)}: {found[-1].measured * 1e3:.1f} ms", flush=True)
    found.sort(key=lambda timed: timed.measured)
    finalists = [timed.plan for timed in found[:5]]
    again = in_pairs(preset, [chosen, *finalists], 15)
    lines = [f"## {name}\n", "| plan | predicted, ms | measured, ms |", "|---|---|---|"]
    lines += [f"| {describe(t.plan)} | {t.predicted * 1e3:.1f} | {t.measured * 1e3:.1f} |" for t in found]
    lines += ["", "The chosen plan and the best five, timed in turn:", "", "| plan | median, ms |", "|---|---|"]
    names = [f"{describe(chosen)} (chosen)", *map(describe, finalists)]
    lines += [f"| {name} | {seconds * 1e3:.1f} |" for name, seconds in zip(names, again, strict=True)]
    lines.append(f"\nThe chosen plan takes {again[0] / min(again):.3f} of the best one's time.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the two on the presets asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("predict", "choose"))
    parser.add_argument("--presets", default=",".join(NAMES), help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--plans", type=int, default=20, help="random plans of `predict`; default: 20")
    parser.add_argument("--seed", type=int, default=0, help="of the random plans; default: 0")
    parser.add_argument("--whole", action="store_true", help="of `choose`: plans with one micro-batch alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables there too")
    args = parser.parse_args(argv)
    names = args.presets.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--presets: {unknown[0]} is unknown, of {', '.join(NAMES)} are wanted")
    set_allocator()
    enable_compilation_cache()
    mp_lstm.emulate_devices(2)
    warn_if_busy()
    tables = []
    for name in names:
        if args.what == "choose":
            tables.append(choose(name, whole=args.whole))
        else:
            tables.append(predict(name, args.plans, args.seed))
        print(f"\n{tables[-1]}\n", flush=True)
        if args.out:
            args.out.write_text("\n\n".join(tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
