"""What the devices really did: task intervals read back from JAX's profiler.

Programs carry their stage and phase in their names, and every operation of an execution carries the execution's
number, so the first start and last end of its operations are the task's interval. On emulated devices, which share
their host's cores, a task is "busy" also while it waits for a core between two of its operations.

A profile knows stages and phases, but neither steps nor units. A stage runs its tasks of one kind in the schedule's
order, step after step, so counting tells which task an interval is (`timelines_of`): the fifth F of stage 0, where a
step has four, is the first F of its second step. A measured step is then a `Timeline` like a predicted one.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mp_lstm.errors import InputError
from mp_lstm.planning.schedule import Schedule, Task
from mp_lstm.planning.simulate import Timeline
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
      seconds: mean wall time of a step.
      busy: share of the time during which a device's tasks ran, by device index.
      steps: what each step did, from the start of its first task. A step begins before the last U of the one before
        has ended, so these are a little longer than `seconds`.
    """

    intervals: tuple[Interval, ...]
    seconds: float
    busy: dict[int, float]
    steps: tuple[Timeline, ...]

    @property
    def median(self) -> Timeline:
        """The step of median length; of an even number the shorter of the middle two."""
        return sorted(self.steps, key=lambda step: step.makespan)[(len(self.steps) - 1) // 2]


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


def timelines_of(
    intervals: Iterable[Interval], schedules: Sequence[Schedule], nothing: Container[tuple[str, int]] = ()
) -> tuple[Timeline, ...]:
    """Pairs what ran with the tasks of the steps that ran.

    Args:
      intervals: of all programs, in order of their start.
      schedules: of each step, in order.
      nothing: kind and stage of tasks that compute nothing, as B of an embedding: no profile has them, and they take no
        time as soon as what their device does before them is done.

    Returns:
      For each step the start and end of its tasks, in seconds since the first of them began, and what that makes its
      devices' busy and idle time.

    Raises:
      InputError: the profile has more or fewer intervals of a stage and kind than the steps have tasks.

    Example:
      >>> from mp_lstm.planning import serial
      >>> phases = ("forward", "backward", "weight_gradient", "update")
      >>> ran = [Interval(0, phase, start, start + 1.0) for phase, start in zip(phases, (5.0, 6.0, 7.0, 12.0))]
      >>> (step,) = timelines_of(ran, [serial((0,), (1,))])
      >>> step.makespan, step.busy, step.idle
      (8.0, {0: 4.0}, {0: 0.5})
    """
    ran: dict[tuple[str, int], list[Interval]] = {}
    for interval in intervals:
        if interval.kind:
            ran.setdefault((interval.kind, interval.stage), []).append(interval)
    tasks = [(task.kind, task.stage) for schedule in schedules for task in schedule.tasks]
    _check_complete(ran, Counter(task for task in tasks if task not in nothing))
    nth = {key: iter(found) for key, found in ran.items()}

    def of(schedule: Schedule) -> dict[Task, Interval]:
        found: dict[Task, Interval] = {}
        before: dict[int, Interval] = {}  # by device
        for task in schedule.tasks:
            key, device = (task.kind, task.stage), schedule.devices[task.stage]
            interval = before[device]._replace(start=before[device].end) if key in nothing else next(nth[key])
            found[task] = before[device] = interval
        return found

    return tuple(_timeline(schedule, of(schedule)) for schedule in schedules)


def _check_complete(ran: Mapping[tuple[str, int], list[Interval]], wanted: Counter[tuple[str, int]]) -> None:
    for kind, stage in sorted({*wanted, *ran}):
        found = len(ran.get((kind, stage), ()))
        if found != wanted[kind, stage]:
            raise InputError(
                f"the profile has {found} {kind} of stage {stage}, the steps measured have {wanted[kind, stage]}: "
                "measure fewer steps at once, a profile holds only so many events, and run nothing else beside them"
            )


def _timeline(schedule: Schedule, ran: Mapping[Task, Interval]) -> Timeline:
    began = min(interval.start for interval in ran.values())
    start = {task: interval.start - began for task, interval in ran.items()}
    end = {task: interval.end - began for task, interval in ran.items()}
    makespan = max(end.values())
    busy = {device: _union([ran[task] for task in tasks]) for device, tasks in schedule.by_device().items()}
    idle = {device: 1.0 - worked / makespan for device, worked in busy.items()}
    return Timeline(start, end, makespan, busy, idle)


def measure_steps(pipe: Pipeline, state: State, windows: Iterable[Window]) -> tuple[State, Measured]:
    """Runs steps under the profiler.

    Args:
      pipe: a warmed-up pipeline.
      state: consumed, unless the pipeline keeps its states.
      windows: one for each step.

    Returns:
      The state after the steps, and what they did.

    Raises:
      InputError: the profile is incomplete; see `timelines_of`.
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
    programs = {key: program for window in windows for n in window.lengths for key, program in pipe.programs[n].items()}
    nothing = {(KINDS.get(key.phase, ""), key.stage) for key, program in programs.items() if not program.computes}
    steps = timelines_of(intervals, [pipe.plan.schedule(window.lengths) for window in windows], nothing)
    return state, Measured(intervals, span / len(windows), busy, steps)


def _union(intervals: list[Interval]) -> float:
    """Time during which at least one interval runs."""
    total, reached = 0.0, float("-inf")
    for interval in sorted(intervals, key=lambda interval: interval.start):
        total += max(0.0, interval.end - max(interval.start, reached))
        reached = max(reached, interval.end)
    return total
