"""When each task of a schedule starts and ends, given how long tasks and transfers take.

A device does its tasks one after another in the schedule's order, each as soon as the device is free and what the task
needs has arrived; a transfer delays the receiver and occupies nobody. This is what a step's dispatch does too, so with
true times it predicts a step, and with times of one tick it draws the timetable.

It is no model of devices that share a processor: there, times would depend on who else is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mp_lstm.planning.schedule import Schedule, Task, broken, dependencies, label

Times = Callable[[Task], float] | Mapping[Task, float]
Transfer = Callable[[Task, int, int], float]


class Timeline(NamedTuple):
    """A simulated step, in seconds (or whatever the times were in).

    Args:
      start, end: of each task, from the step's beginning.
      makespan: the step's end.
      busy: time each device works, by device index.
      idle: share of the makespan that each device does not.
    """

    start: dict[Task, float]
    end: dict[Task, float]
    makespan: float
    busy: dict[int, float]
    idle: dict[int, float]


def no_transfer(task: Task, from_stage: int, to_stage: int) -> float:
    """Transfers that take no time."""
    return 0.0


def simulate(schedule: Schedule, times: Times, *, transfer: Transfer = no_transfer) -> Timeline:
    """Simulates a step.

    Args:
      schedule: a valid schedule.
      times: seconds of a task, as a function or a mapping.
      transfer: (task, from stage, to stage) -> seconds until what the task yields has reached the other stage. Stages
        that share a device send nothing.

    Returns:
      The timeline.

    Raises:
      InputError: a task comes before one that it needs.

    Example:
      >>> from mp_lstm.planning.schedule import wavefront
      >>> timeline = simulate(wavefront((0, 1), (4,)), lambda task: {"F": 1.0, "B": 1.0, "W": 4.0, "U": 0.5}[task.kind])
      >>> timeline.makespan, timeline.busy[0], round(timeline.idle[0], 3)
      (14.5, 12.5, 0.138)
    """
    seconds = times if callable(times) else times.__getitem__
    devices = schedule.devices
    start: dict[Task, float] = {}
    end: dict[Task, float] = {}
    free = dict.fromkeys(sorted(set(devices)), 0.0)
    busy = dict(free)
    needs_of_updates = dependencies(schedule, Task("U", 0))  # the same for all stages
    for position, task in enumerate(schedule.tasks):
        device, begin = devices[task.stage], free[devices[task.stage]]
        for need in needs_of_updates if task.kind == "U" else dependencies(schedule, task):
            if need not in end:
                raise broken(schedule, position, need)
            local = devices[need.stage] == device
            begin = max(begin, end[need] + (0.0 if local else transfer(need, need.stage, task.stage)))
        duration = seconds(task)
        start[task], end[task] = begin, begin + duration
        free[device] = end[task]
        busy[device] += duration
    makespan = max(free.values())
    idle = {device: 1.0 - worked / makespan if makespan else 0.0 for device, worked in busy.items()}
    return Timeline(start, end, makespan, busy, idle)


def timetable(schedule: Schedule) -> str:
    """Draws a schedule with one row a stage and one tick a task.

    Cells: F3 is chunk 3 of the only micro-batch, F1.3 chunk 3 of micro-batch 1, "." an idle tick.

    Args:
      schedule: a valid schedule.

    Returns:
      The drawing, a line for the ticks and one for each stage.

    Example:
      >>> from mp_lstm.planning.schedule import wavefront
      >>> print(timetable(wavefront((0, 1), (2,))))
      tick      0   1   2   3   4   5   6   7
      stage 0   F0  F1  .   .   B1  B0  W   U
      stage 1   .   F0  F1  B1  B0  W   .   U
    """
    timeline = simulate(schedule, lambda task: 1.0)
    ticks = round(timeline.makespan)
    cells = [["."] * ticks for _ in schedule.devices]
    for task, tick in timeline.start.items():
        cells[task.stage][round(tick)] = label(task, microbatches=len(schedule.chunks))
    width = max(len(str(ticks - 1)), *(len(cell) for row in cells for cell in row)) + 2
    names = [f"stage {stage}" for stage in range(schedule.stages)]
    margin = len(names[-1]) + 3
    # The last digit of a tick stands over the first character of its cells.
    header = "tick".ljust(margin - width + 1) + "".join(str(tick).rjust(width) for tick in range(ticks))
    rows = [
        name.ljust(margin) + "".join(cell.ljust(width) for cell in row) for name, row in zip(names, cells, strict=True)
    ]
    return "\n".join(line.rstrip() for line in [header, *rows])
