"""What enqueueing a task costs the host, and from which task time on that no longer matters.

The devices are kept from working meanwhile: a program that only spins holds stage 0, on which all else waits. So the
host's core is its own, and what is timed is the walk through the schedule, its calls and its transfers.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mp_lstm
from mp_lstm.runtime.placement import Device, put, stage_sharding
from tables.kit import Runner, Series, draw, full_batch, in_turn, lines, markdown, prose, together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHUNKS = (1, 2, 4, 8)  # more, and a device has 32 programs waiting, at which CPU devices make the host wait
STAGES = (1, 2)
ROWS, CHUNK = 20, 4
SIZES: dict[str, Any] = {"vocab": 2_000, "embed": 64, "hidden": 64, "layers": 4}
TINY: dict[str, Any] = {"vocab": 50, "embed": 4, "hidden": 4, "layers": 2}
SPIN_SECONDS = 0.3
TRIAL = 1 << 16  # turns, to find out how long one takes


class Enqueued(NamedTuple):
    """A step: its tasks, the seconds it took to enqueue it, and those from one step to the next when devices work."""

    stages: int
    chunks: int
    tasks: int
    host: float
    step: float


class Spin:
    """A program that keeps a device busy. A loop: a program without one may be run by whoever enqueues it."""

    def __init__(self, device: Device, seconds: float):
        self._sharding = stage_sharding(device)
        self._loop = jax.jit(lambda turns: jax.lax.fori_loop(0, turns, lambda _, x: 0.5 * x + 0.5, jnp.ones(4096)))
        self._turns = put(np.int32(TRIAL), self._sharding)
        trials = [self._seconds() for _ in range(4)]  # the first compiles
        self._turns = put(np.int32(TRIAL * seconds / min(trials)), self._sharding)

    def _seconds(self) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self.start())
        return time.perf_counter() - began

    def start(self) -> Any:
        """Enqueues it; its result is there when the device is free again."""
        return self._loop(self._turns)


def enqueue_seconds(pipe: mp_lstm.Pipeline, window: Any, spin: Spin, rounds: int) -> float:
    """Median seconds of a call of `step` whose first task waits."""
    state, seconds = pipe.init(jax.random.key(0)), []
    for _ in range(rounds):
        jax.block_until_ready(state)
        spun = spin.start()
        began = time.perf_counter()
        state, _ = pipe.step(state, window)
        seconds.append(time.perf_counter() - began)
        assert not spun.is_ready(), "the step waited for the device"
    jax.block_until_ready(state)
    return statistics.median(seconds)


def measure(model: mp_lstm.Model, rounds: int) -> list[Enqueued]:
    """Enqueues steps of several numbers of tasks."""
    spin, found = Spin(jax.devices()[0], SPIN_SECONDS), []
    for stages in STAGES:
        for chunks in CHUNKS:
            plan = mp_lstm.make_plan(
                model,
                batch_size=ROWS,
                lengths=(CHUNK * chunks,),
                devices=jax.devices()[:stages],
                stages=stages,
                schedule="wavefront",
                chunk=CHUNK,
                microbatches=1,
            )
            pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1), max_norm=5.0)
            window = pipe.place(full_batch(model, CHUNK * chunks, ROWS))
            runner = Runner(pipe, [window])
            (steps,) = in_turn([lambda runner=runner, window=window: runner.seconds([window] * 4) / 4], rounds)
            tasks = len(plan.schedule(window.lengths).tasks)
            host = enqueue_seconds(pipe, window, spin, rounds)
            found.append(Enqueued(stages, chunks, tasks, host, statistics.median(steps)))
    return found


def line(found: list[Enqueued]) -> tuple[float, float]:
    """Seconds a task, and those of a step beside its tasks: least squares."""
    slope, offset = np.polyfit([one.tasks for one in found], [one.host for one in found], 1)
    return float(slope), float(offset)


def table(picture: Path, *, quick: bool) -> str:
    """Measures, draws, and says what it shows."""
    sizes, rounds = (TINY, 3) if quick else (SIZES, 15)
    found = measure(mp_lstm.language_model(**sizes), rounds)
    rows = [
        (one.stages, one.chunks, one.tasks, f"{one.host * 1e3:.2f}", f"{each * 1e6:.0f}", f"{one.step * 1e3:.2f}")
        for one in found
        for each in (one.host / one.tasks,)
    ]
    most = max(STAGES)
    task, offset = line([one for one in found if one.stages == most])

    def panel(axes: Axes) -> None:
        parts = [[one for one in found if one.stages == stages] for stages in STAGES]
        series = [
            Series(f"{part[0].stages} stages", [one.tasks for one in part], [one.host * 1e3 for one in part])
            for part in parts
        ]
        lines(axes, series, "tasks of a step", "ms to enqueue it")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)

    head = ["stages", "chunks", "tasks", "to enqueue, ms", "a task, µs", "a step, ms"]
    return together(
        prose(
            f"Host time of a call of `step` ({sizes['layers']} layers of {sizes['hidden']}, {ROWS} rows, chunks of",
            f"{CHUNK} steps, `wavefront`) while a spinning program keeps stage 0 and so all others waiting; medians of",
            f"{rounds}. The last column is the time from one step to the next when nothing is held up.",
        ),
        markdown(head, rows),
        prose(
            f"On {most} stages a task takes the host {task * 1e6:.0f} µs (transfers included), and a step",
            f"{offset * 1e6:.0f} µs besides (norms, constants, metrics). One thread enqueues for all devices, so",
            f"**dispatch dominates where F or B of a stage's chunk takes less than {task * 1e6:.0f} µs times the",
            f"number of stages: {most * task * 1e3:.2f} ms on {most} devices**.",
        ),
        draw(picture, [panel]),
    )
