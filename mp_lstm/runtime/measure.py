"""What the devices really did: task intervals read back from JAX's profiler.

Programs carry their stage and phase in their names, and every operation of an execution carries the execution's
number, so the first start and last end of its operations are the task's interval. On emulated devices, which share
their host's cores, a task is "busy" also while it waits for a core between two of its operations.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mp_lstm.runtime.pipeline import Pipeline, Window
from mp_lstm.runtime.state import State

PROGRAM = re.compile(r"jit_stage(\d+)_(\w+)")
KINDS = {
    "forward": "F",
    "backward": "B",
    "backward_add": "B",
    "weight_gradient": "W",
    "weight_gradient_add": "W",
    "update": "U",
}


class Interval(NamedTuple):
    """One execution of a program: its stage, phase, and start and end in seconds."""

    stage: int
    phase: str
    start: float
    end: float

    @property
    def kind(self) -> str | None:
        """F, B, W or U; None for the small programs between them."""
        return KINDS.get(self.phase)


class Measured(NamedTuple):
    """What some steps did.

    Args:
      intervals: of all programs, in order of their start.
      seconds: wall time of a step.
      busy: share of the time during which a device's tasks ran, by device index.
    """

    intervals: tuple[Interval, ...]
    seconds: float
    busy: dict[int, float]


def trace(function: Callable[[], Any]) -> tuple[Interval, ...]:
    """Runs a function, waits for what it returns, and reads back every program that ran."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(function())
        (path,) = Path(folder).rglob("*.xplane.pb")
        return intervals_of(jax.profiler.ProfileData.from_file(str(path)))


def intervals_of(data: Any) -> tuple[Interval, ...]:
    """Intervals of the programs in a profile."""
    ends: dict[tuple[str, Any], tuple[float, float]] = {}
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                module = stats.get("hlo_module")
                if module is None or not PROGRAM.match(str(module)):
                    continue
                key = (str(module), stats.get("run_id"))
                start, end = event.start_ns / 1e9, event.end_ns / 1e9
                before = ends.get(key, (start, end))
                ends[key] = (min(before[0], start), max(before[1], end))
    found = []
    for (module, _), (start, end) in ends.items():
        match = PROGRAM.match(module)
        assert match is not None
        found.append(Interval(int(match[1]), match[2], start, end))
    return tuple(sorted(found, key=lambda interval: interval.start))


def measure_steps(pipe: Pipeline, state: State, windows: Iterable[Window]) -> tuple[State, Measured]:
    """Runs steps under the profiler.

    Args:
      pipe: a warmed-up pipeline.
      state: consumed, unless the pipeline keeps its states.
      windows: one for each step.

    Returns:
      The state after the steps, and what they did.
    """
    windows = [pipe.place(window) for window in windows]
    jax.block_until_ready(state)

    def run() -> State:
        nonlocal state
        for window in windows:
            state, _ = pipe.step(state, window)
        return state

    intervals = trace(run)
    tasks = [interval for interval in intervals if interval.kind]
    span = max(task.end for task in tasks) - min(task.start for task in tasks)
    busy = {
        device: _union([task for task in tasks if pipe.plan.device_indices[task.stage] == device]) / span
        for device in sorted(set(pipe.plan.device_indices))
    }
    return state, Measured(intervals, span / len(windows), busy)


def _union(intervals: list[Interval]) -> float:
    """Time during which at least one interval runs."""
    total, reached = 0.0, float("-inf")
    for interval in sorted(intervals, key=lambda interval: interval.start):
        total += max(0.0, interval.end - max(interval.start, reached))
        reached = max(reached, interval.end)
    return total
