"""Schedules as data: which task of which stage comes when, as one total order that each device follows its part of.

A batch is cut into units: micro-batches (groups of rows) x chunks (slices of time). The work of a stage is F and B of
every unit, W of every micro-batch over its joined chunks, and U once. With S=2 stages, C=4 chunks, M=1:

    tick      0   1   2   3   4   5   6   7   8   9  10  11
    stage 0   F0  F1  F2  F3  .   .   B3  B2  B1  B0  W   U
    stage 1   .   F0  F1  F2  F3  B3  B2  B1  B0  W   .   U

What must come before what is the same for every schedule (`dependencies`):

    F(s,m,c) <- F(s-1,m,c), F(s,m,c-1), F(s,m-1,last)     the input, the carried state, and that of the text before
    B(s,m,c) <- F(s,m,c), B(s+1,m,c), B(s,m,c+1)          what F saved, the gradient of the output and of the state
    W(s,m)   <- B(s,m,c) for all c                        the tapes
    U(s)     <- W of all stages and micro-batches         the global norm

A schedule fixes the order per device only: between devices nothing but the dependencies holds. In its total order no
task waits for a later one, so a single thread can dispatch it without ever blocking a device on another one's work.
How orders are made is in `schedules.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mp_lstm.errors import InputError
from mp_lstm.planning.costs import Kind

KINDS: tuple[Kind, ...] = ("F", "B", "W", "U")


class Unit(NamedTuple):
    """One chunk of one micro-batch."""

    microbatch: int
    chunk: int


class Task(NamedTuple):
    """One kind of work of one stage: F and B on one unit, W on all chunks of one micro-batch, U on none."""

    kind: Kind
    stage: int
    units: tuple[Unit, ...] = ()

    @property
    def microbatch(self) -> int:
        """The micro-batch of an F, B or W."""
        return self.units[0].microbatch

    def __str__(self) -> str:
        return f"{label(self)} of stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The tasks of a step in one total order; each device's order is its subsequence.

    Args:
      name: of the generator.
      devices: index of the device of each stage; stages may share one.
      chunks: number of chunks of each micro-batch.
      tasks: every task once, none before what it needs.
      defer: most tapes a stage holds at once: micro-batches whose Bs are done and whose W is not.

    Example:
      >>> forward, backward = (Task(kind, 0, (Unit(0, 0),)) for kind in "FB")
      >>> print(Schedule("mine", (0,), (1,), (forward, backward, weight_task(0, 0, (1,)), Task("U", 0)), defer=1))
      tick      0   1   2   3
      stage 0   F0  B0  W   U
    """

    name: str
    devices: tuple[int, ...]
    chunks: tuple[int, ...]
    tasks: tuple[Task, ...]
    defer: int

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.devices)

    def by_device(self) -> dict[int, tuple[Task, ...]]:
        """The tasks of each device, in its order."""
        orders: dict[int, list[Task]] = {device: [] for device in sorted(set(self.devices))}
        for task in self.tasks:
            orders[self.devices[task.stage]].append(task)
        return {device: tuple(order) for device, order in orders.items()}

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """For each task the positions, in `tasks`, of what it needs; computed once, for all who walk the order.

        U needs the last W of each stage here, which its device does after the stage's others: with S stages and M
        micro-batches these are S edges instead of S M.

        Raises:
          InputError: a task comes before one that it needs.
        """
        places: dict[Task, int] = {}
        of_update: tuple[int, ...] | None = None  # the same for all stages
        found = []
        for place, task in enumerate(self.tasks):
            if task.kind == "U":
                of_update = of_update or self._last_weights(place, places)
                found.append(of_update)
            else:
                needs = dependencies(self, task)
                missing = next((need for need in needs if need not in places), None)
                if missing is not None:
                    raise _broken(self, place, missing)
                found.append(tuple(places[need] for need in needs))
            places[task] = place
        return tuple(found)

    def _last_weights(self, place: int, places: dict[Task, int]) -> tuple[int, ...]:
        """The position of the last W of each stage before the U at `place`."""
        last: dict[int, int] = {}
        for need in dependencies(self, self.tasks[place]):
            if need not in places:
                raise _broken(self, place, need)
            last[need.stage] = max(last.get(need.stage, 0), places[need])
        return tuple(last.values())

    def __str__(self) -> str:
        return timetable(self)


def label(task: Task, *, microbatches: int | None = None) -> str:
    """Writes a task as timetables do: F3 (chunk 3) where there is one micro-batch, else F1.3 and W1."""
    if not task.units or (microbatches == 1 and task.kind == "W"):
        return task.kind
    unit = task.units[0]
    if task.kind == "W":
        return f"W{unit.microbatch}"
    return f"{task.kind}{unit.chunk}" if microbatches == 1 else f"{task.kind}{unit.microbatch}.{unit.chunk}"


def weight_task(stage: int, microbatch: int, chunks: Sequence[int]) -> Task:
    """Makes the W of a stage and micro-batch, over its joined chunks.

    Example:
      >>> weight_task(1, 0, (2,))
      Task(kind='W', stage=1, units=(Unit(microbatch=0, chunk=0), Unit(microbatch=0, chunk=1)))
    """
    return Task("W", stage, tuple(Unit(microbatch, chunk) for chunk in range(chunks[microbatch])))


def work(stages: int, chunks: Sequence[int]) -> list[Task]:
    """Lists every task of a step, by kind, then stage, then unit.

    Example:
      >>> [str(task) for task in work(1, (2,))]
      ['F0.0 of stage 0', 'F0.1 of stage 0', 'B0.0 of stage 0', 'B0.1 of stage 0', 'W0 of stage 0', 'U of stage 0']
    """
    joined = [tuple(Unit(m, c) for c in range(count)) for m, count in enumerate(chunks)]
    single = [(unit,) for units in joined for unit in units]
    units: dict[Kind, list[tuple[Unit, ...]]] = {"F": single, "B": single, "W": joined, "U": [()]}
    return [Task(kind, stage, these) for kind in KINDS for stage in range(stages) for these in units[kind]]


def dependencies(schedule: Schedule, task: Task) -> tuple[Task, ...]:
    """Lists what a task needs done before it: see the table at the top of this module.

    Args:
      schedule: the schedule; only its stages and chunks matter.
      task: one of its tasks.

    Returns:
      The tasks, each of them once.

    Example:
      >>> schedule = Schedule("mine", devices=(0, 1), chunks=(2,), tasks=(), defer=1)
      >>> [str(need) for need in dependencies(schedule, Task("B", 0, (Unit(0, 0),)))]
      ['F0.0 of stage 0', 'B0.0 of stage 1', 'B0.1 of stage 0']
    """
    return needs_of(schedule.stages, schedule.chunks, task)


def needs_of(stages: int, chunks: Sequence[int], task: Task) -> tuple[Task, ...]:
    """Lists what a task needs, as `dependencies` does, where there is no schedule yet."""
    kind, stage, units = task
    if kind == "U":
        return tuple(weight_task(other, m, chunks) for other in range(stages) for m in range(len(chunks)))
    if kind == "W":
        return tuple(Task("B", stage, (unit,)) for unit in units)
    (microbatch, chunk) = units[0]
    needs = []
    if kind == "F":
        if stage:
            needs.append(Task("F", stage - 1, units))
        if chunk:
            needs.append(Task("F", stage, (Unit(microbatch, chunk - 1),)))
        elif microbatch:
            needs.append(Task("F", stage, (Unit(microbatch - 1, chunks[microbatch - 1] - 1),)))
    else:
        needs.append(Task("F", stage, units))
        if stage < stages - 1:
            needs.append(Task("B", stage + 1, units))
        if chunk < chunks[microbatch] - 1:
            needs.append(Task("B", stage, (Unit(microbatch, chunk + 1),)))
    return tuple(needs)


def timetable(schedule: Schedule) -> str:
    """Draws a schedule with one row a stage and one tick a task.

    Cells: F3 is chunk 3 of the only micro-batch, F1.3 chunk 3 of micro-batch 1, "." an idle tick.

    Args:
      schedule: a valid schedule.

    Returns:
      The drawing, a line for the ticks and one for each stage.

    Raises:
      InputError: a task comes before one that it needs.

    Example:
      >>> tasks = [task for task in work(2, (1,)) if task.kind == "F"]
      >>> print(timetable(Schedule("forward", (0, 1), (1,), tuple(tasks), defer=1)))
      tick      0   1
      stage 0   F0  .
      stage 1   .   F0
    """
    begins = _ticks(schedule)
    ticks = max(begins) + 1
    cells = [["."] * ticks for _ in schedule.devices]
    for task, tick in zip(schedule.tasks, begins, strict=True):
        cells[task.stage][tick] = label(task, microbatches=len(schedule.chunks))
    width = max(len(str(ticks - 1)), *(len(cell) for row in cells for cell in row)) + 2
    names = [f"stage {stage}" for stage in range(schedule.stages)]
    margin = len(names[-1]) + 3
    # The last digit of a tick stands over the first character of its cells.
    header = "tick".ljust(margin - width + 1) + "".join(str(tick).rjust(width) for tick in range(ticks))
    rows = [
        name.ljust(margin) + "".join(cell.ljust(width) for cell in row) for name, row in zip(names, cells, strict=True)
    ]
    return "\n".join(line.rstrip() for line in [header, *rows])


def _ticks(schedule: Schedule) -> list[int]:
    """The tick of each task, each taking one and beginning as soon as its device is free and what it needs is done."""
    free = dict.fromkeys(schedule.devices, 0)
    begins: list[int] = []
    for task, needs in zip(schedule.tasks, schedule.needs, strict=True):
        device = schedule.devices[task.stage]
        begins.append(max([free[device], *(begins[need] + 1 for need in needs)]))
        free[device] = begins[-1] + 1
    return begins


def validate(schedule: Schedule) -> None:
    """Checks that a schedule is complete, in an order that can run, and within its own `defer`.

    Args:
      schedule: the schedule.

    Raises:
      InputError: a task is unknown, missing or twice there, comes before one it needs (the first broken dependency is
        named), or a stage holds more than `defer` tapes.

    Example:
      >>> tasks = work(1, (1, 1))  # both Fs, both Bs, both Ws, U
      >>> validate(Schedule("mine", (0,), (1, 1), tuple(tasks), defer=2))
    """
    check_arguments(schedule.devices, schedule.chunks, schedule.defer)
    _check_complete(schedule)
    _ = schedule.needs  # raises where the order is broken
    _check_defer(schedule)


def check_arguments(devices: Sequence[int], chunks: Sequence[int], defer: int | None) -> None:
    """Checks what every generator of schedules is given."""
    if not devices:
        raise InputError("a schedule got no stages: pass the device index of each stage, e.g. (0, 1)")
    if not chunks or min(chunks) < 1:
        raise InputError(
            f"a schedule got chunks={tuple(chunks)}, wanted at least 1 for each micro-batch: pass e.g. (4,)"
        )
    if defer is not None and defer < 1:
        raise InputError(f"defer is {defer}, but a W needs its tape: pass at least 1, or None for no limit")


def _check_complete(schedule: Schedule) -> None:
    expected, seen = set(work(schedule.stages, schedule.chunks)), set()
    for task in schedule.tasks:
        if task not in expected:
            raise InputError(
                f"schedule {schedule.name!r} has a task that is not of its {schedule.stages} stages and chunks "
                f"{schedule.chunks}: {tuple(task)}: remove it"
            )
        if task in seen:
            raise InputError(f"schedule {schedule.name!r} has {task} twice: remove one")
        seen.add(task)
    if seen != expected:
        raise InputError(f"schedule {schedule.name!r} lacks {min(expected - seen)}: add it")


def _broken(schedule: Schedule, position: int, need: Task) -> InputError:
    """The error for a task that comes before one that it needs."""
    task = schedule.tasks[position]
    return InputError(
        f"schedule {schedule.name!r} has {task} at position {position}, before {need}, which it needs: swap them"
    )


def _check_defer(schedule: Schedule) -> None:
    backward: dict[tuple[int, int], int] = defaultdict(int)  # Bs done of a stage and micro-batch
    held: dict[int, int] = defaultdict(int)
    for task in schedule.tasks:
        if task.kind == "B":
            backward[task.stage, task.microbatch] += 1
            held[task.stage] += backward[task.stage, task.microbatch] == schedule.chunks[task.microbatch]
        elif task.kind == "W":
            held[task.stage] -= 1
        if held[task.stage] > schedule.defer:
            raise InputError(
                f"schedule {schedule.name!r} holds {held[task.stage]} tapes after {task}, its defer is "
                f"{schedule.defer}: do a W of the stage first, or raise defer"
            )
