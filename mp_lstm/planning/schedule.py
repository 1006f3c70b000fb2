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

A schedule adds its own choices to these: `arrange` takes them as more edges and a rank, and lets every device do the
ready task of lowest rank, tick by tick. The result is a total order in which no task waits for a later one, so a
single thread can dispatch it without ever blocking a device on another one's work. A new schedule is a function
`(devices, chunks, *, defer=None) -> Schedule` in `SCHEDULES`, in most cases one call of `arrange`.

A schedule fixes the order per device only: between devices nothing but the dependencies holds.

This file is longer than most: what a schedule is, how one is made and what makes it valid are read together.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from mp_lstm.errors import InputError

Kind = Literal["F", "B", "W", "U"]
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
      >>> print(wavefront((0, 1), (2,)))
      tick      0   1   2   3   4   5   6   7
      stage 0   F0  F1  .   .   B1  B0  W   U
      stage 1   .   F0  F1  B1  B0  W   .   U
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

    def __str__(self) -> str:
        from mp_lstm.planning.simulate import timetable  # it imports this module

        return timetable(self)


Generator = Callable[..., Schedule]  # (devices, chunks, *, defer=None) -> Schedule


def label(task: Task, *, microbatches: int | None = None) -> str:
    """Writes a task as timetables do: F3 (chunk 3) where there is one micro-batch, else F1.3 and W1."""
    if not task.units or (microbatches == 1 and task.kind == "W"):
        return task.kind
    unit = task.units[0]
    if task.kind == "W":
        return f"W{unit.microbatch}"
    return f"{task.kind}{unit.chunk}" if microbatches == 1 else f"{task.kind}{unit.microbatch}.{unit.chunk}"


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
      >>> schedule = wavefront((0, 1), (2,))
      >>> [str(need) for need in dependencies(schedule, Task("B", 0, (Unit(0, 0),)))]
      ['F0.0 of stage 0', 'B0.0 of stage 1', 'B0.1 of stage 0']
    """
    return _needs(schedule.stages, schedule.chunks, task)


def _needs(stages: int, chunks: Sequence[int], task: Task) -> tuple[Task, ...]:
    kind, stage, units = task
    if kind == "U":
        return tuple(other for other in work(stages, chunks) if other.kind == "W")
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


def serial(devices: Sequence[int], chunks: Sequence[int], *, defer: int | None = None) -> Schedule:
    """Runs one micro-batch after another, uncut: F up the stages, B down, then W. The baseline without a pipeline.

    Args:
      devices: index of the device of each stage.
      chunks: number of chunks of each micro-batch, all 1.
      defer: most tapes a stage may hold; here a stage never holds more than one.

    Returns:
      The schedule.

    Raises:
      InputError: a micro-batch is cut into chunks.

    Example:
      >>> print(serial((0, 1), (1,)))
      tick      0   1   2   3   4   5
      stage 0   F0  .   .   B0  W   U
      stage 1   .   F0  B0  W   .   U
    """
    _check_arguments(devices, chunks, defer)
    for microbatch, count in enumerate(chunks):
        if count != 1:
            raise InputError(
                f"schedule 'serial' got {count} chunks for micro-batch {microbatch}, it cuts no time: "
                "use 1 chunk, or schedule='wavefront'"
            )
    up, down = range(len(devices)), range(len(devices) - 1, -1, -1)
    passes: tuple[tuple[Kind, Iterable[int]], ...] = (("F", up), ("B", down), ("W", down))
    tasks = [
        Task(kind, stage, (Unit(microbatch, 0),))
        for microbatch in range(len(chunks))
        for kind, stages in passes
        for stage in stages
    ]
    tasks += [Task("U", stage) for stage in up]
    return Schedule("serial", tuple(devices), tuple(chunks), tuple(tasks), defer=1)


def wavefront(devices: Sequence[int], chunks: Sequence[int], *, defer: int | None = None) -> Schedule:
    """Fills the pipeline with the chunks of all micro-batches: all F of a stage, then all its B, W where it would idle.

    With S stages of equal F, B, W and U, N units and M micro-batches, and nothing forced by `defer`, a device idles
    for (S-1)(F+B) of a step of (N+S-1)(F+B) + M W + U: the fill and the drain of the pipeline.

    Args:
      devices: index of the device of each stage.
      chunks: number of chunks of each micro-batch, which may differ.
      defer: most tapes a stage may hold, at least 1; None: no limit. A stage that holds as many does a W before it
        completes another micro-batch's backward pass.

    Returns:
      The schedule.

    Example:
      >>> print(wavefront((0, 1), (2, 1)))
      tick      0     1     2     3     4     5     6     7     8     9    10
      stage 0   F0.0  F0.1  F1.0  .     .     B0.1  B0.0  B1.0  W0    W1    U
      stage 1   .     F0.0  F0.1  F1.0  B0.1  B0.0  B1.0  W0    W1    .     U
    """
    _check_arguments(devices, chunks, defer)
    stages, microbatches = len(devices), len(chunks)
    defer = microbatches if defer is None else min(defer, microbatches)
    before = [0, *accumulate(chunks)]  # units before each micro-batch

    def after(task: Task) -> list[Task]:
        if task.kind != "B":
            return []
        (microbatch, chunk), edges = task.units[0], []
        if chunk == chunks[microbatch] - 1:  # Bs follow all Fs of the stage, and go by micro-batch
            previous = Task("B", task.stage, (Unit(microbatch - 1, 0),))
            edges.append(previous if microbatch else Task("F", task.stage, (Unit(microbatches - 1, chunks[-1] - 1),)))
        if chunk == 0 and microbatch >= defer:  # this B completes a tape, so there must be room for one
            edges.append(weight_task(task.stage, microbatch - defer, chunks))
        return edges

    def rank(task: Task) -> tuple[int, ...]:
        if task.kind in "WU":  # where nothing else is ready, oldest first
            return KINDS.index(task.kind), task.microbatch if task.units else 0, task.stage
        microbatch, chunk = task.units[0]
        if task.kind == "F":  # by wave front; of stages that share a device, the later one drains first
            return 0, before[microbatch] + chunk + task.stage, -task.stage
        return 1, before[microbatch + 1] - 1 - chunk + stages - 1 - task.stage, task.stage

    return arrange("wavefront", devices, chunks, after=after, rank=rank, defer=defer)


SCHEDULES: dict[str, Generator] = {"serial": serial, "wavefront": wavefront}


def weight_task(stage: int, microbatch: int, chunks: Sequence[int]) -> Task:
    """The W of a stage and micro-batch, over its joined chunks."""
    return Task("W", stage, tuple(Unit(microbatch, chunk) for chunk in range(chunks[microbatch])))


def arrange(
    name: str,
    devices: Sequence[int],
    chunks: Sequence[int],
    *,
    after: Callable[[Task], Iterable[Task]],
    rank: Callable[[Task], Any],
    defer: int,
) -> Schedule:
    """Builds a schedule by list scheduling: each device always does the ready task of lowest rank.

    A task is ready when what it needs is done. F, B and U take one tick, W one for each chunk it joins.

    Args:
      name: of the schedule.
      devices: index of the device of each stage.
      chunks: number of chunks of each micro-batch.
      after: the tasks that must precede a task by the schedule's choice, beside its dependencies.
      rank: sorts the ready tasks of a device.
      defer: most tapes a stage may hold; `after` has to see to it.

    Returns:
      The schedule, its tasks in the order in which they start.

    Raises:
      InputError: the edges of `after` and the dependencies form a cycle.

    Example:
      >>> backward_first = lambda task: ("BFWU".index(task.kind), task.units)
      >>> print(arrange("eager", (0,), (1, 1), after=lambda task: (), rank=backward_first, defer=2))
      tick      0     1     2     3     4     5     6
      stage 0   F0.0  B0.0  F1.0  B1.0  W0    W1    U
    """
    stages = len(devices)
    tasks = work(stages, chunks)
    update = _needs(stages, chunks, Task("U", 0))  # the same for all stages
    needs = {task: {*(update if task.kind == "U" else _needs(stages, chunks, task)), *after(task)} for task in tasks}
    order = _list_schedule(needs, devices, rank)
    if len(order) < len(tasks):
        _report_cycle(name, needs, set(order))
    return Schedule(name, tuple(devices), tuple(chunks), tuple(order), defer)


def _list_schedule(needs: Mapping[Task, set[Task]], devices: Sequence[int], rank: Callable[[Task], Any]) -> list[Task]:
    """The tasks in the order in which they start; those that wait for one another are left out."""
    place = {task: i for i, task in enumerate(needs)}  # breaks ties of rank
    waiting = {task: len(need) for task, need in needs.items()}
    followers: dict[Task, list[Task]] = defaultdict(list)
    for task, need in needs.items():
        for other in need:
            followers[other].append(task)
    ready: dict[int, list[tuple[Any, int, Task]]] = {device: [] for device in sorted(set(devices))}
    running: list[tuple[int, int, Task]] = []  # by end
    idle, order, now = set(ready), [], 0

    def release(task: Task) -> None:
        heapq.heappush(ready[devices[task.stage]], (rank(task), place[task], task))

    for task, count in waiting.items():
        if not count:
            release(task)
    while True:
        for device in sorted(idle):  # (1) every idle device begins its first ready task
            if ready[device]:
                task = heapq.heappop(ready[device])[-1]
                order.append(task)
                idle.remove(device)
                heapq.heappush(running, (now + max(1, len(task.units)), place[task], task))
        if not running:
            return order
        now = running[0][0]
        while running and running[0][0] == now:  # (2) what ends next frees its device and what waited for it
            task = heapq.heappop(running)[-1]
            idle.add(devices[task.stage])
            for follower in followers[task]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    release(follower)


def _report_cycle(name: str, needs: Mapping[Task, set[Task]], done: set[Task]) -> None:
    stuck = next(task for task in needs if task not in done)
    missing = next(need for need in sorted(needs[stuck]) if need not in done)
    raise InputError(
        f"schedule {name!r} never runs {stuck}: it waits for {missing}, which never runs either: "
        "remove an edge of `after`"
    )


def validate(schedule: Schedule) -> None:
    """Checks that a schedule is complete, in an order that can run, and within its own `defer`.

    Args:
      schedule: the schedule.

    Raises:
      InputError: a task is unknown, missing or twice there, comes before one it needs (the first broken dependency is
        named), or a stage holds more than `defer` tapes.

    Example:
      >>> validate(wavefront((0, 1, 0), (4, 2)))
    """
    _check_arguments(schedule.devices, schedule.chunks, schedule.defer)
    _check_complete(schedule)
    _check_order(schedule)
    _check_defer(schedule)


def _check_arguments(devices: Sequence[int], chunks: Sequence[int], defer: int | None) -> None:
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


def _check_order(schedule: Schedule) -> None:
    done: set[Task] = set()
    needs_of_updates = dependencies(schedule, Task("U", 0))  # the same for all stages
    for position, task in enumerate(schedule.tasks):
        for need in needs_of_updates if task.kind == "U" else dependencies(schedule, task):
            if need not in done:
                raise broken(schedule, position, need)
        done.add(task)


def broken(schedule: Schedule, position: int, need: Task) -> InputError:
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
