"""The schedules there are, and `arrange`, which makes them.

    serial        one micro-batch after another, uncut     no pipeline: the baseline
    wavefront     all F, then all B; W where idle          a stage holds what F saved of all units
    gpipe         all F, then B and W, newest first        so does it here, but one tape at most
    one_f_one_b   F and B by turns, each B followed by W   a stage holds few micro-batches
    zero_bubble   F and B by turns, W where idle           a few more, and idles less

A schedule adds its own choices to the dependencies: `arrange` takes them as more edges and a rank, and lets every
device do the ready task of lowest rank, tick by tick. The result is a total order in which no task waits for a later
one.

A new schedule is a function `(devices, chunks, *, defer=None) -> Schedule`, in most cases one call of `arrange`; in
`SCHEDULES` it has a name.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

from mp_lstm.errors import InputError
from mp_lstm.planning.costs import Kind
from mp_lstm.planning.schedule import KINDS, Schedule, Task, Unit, check_arguments, needs_of, weight_task, work


class Generator(Protocol):
    """What makes a schedule for the device of each stage and the chunks of each micro-batch."""

    def __call__(self, devices: Sequence[int], chunks: Sequence[int], *, defer: int | None = None) -> Schedule:
        """Makes the schedule; `defer` is the most tapes a stage may hold, None as many as the schedule likes."""
        ...


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
    check_arguments(devices, chunks, defer)
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
    check_arguments(devices, chunks, defer)
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


def gpipe(devices: Sequence[int], chunks: Sequence[int], *, defer: int | None = None) -> Schedule:
    """Does all F of a stage, then the B of the micro-batches from the last to the first, each followed by its W.

    With S stages of equal F, B, W and U, N units and M micro-batches, a device idles for (S-1)(F+B) of a step of
    (N+S-1)(F+B) + M W + U; with one chunk a micro-batch and W counted in B, for (S-1)/(M+S-1) of what precedes U.

    Args:
      devices: index of the device of each stage.
      chunks: number of chunks of each micro-batch, which may differ.
      defer: most tapes a stage may hold; here a stage never holds more than one.

    Returns:
      The schedule.

    References:
      Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, arXiv:1811.06965.

    Example:
      >>> print(gpipe((0, 1), (1, 1)))
      tick      0     1     2     3     4     5     6     7     8
      stage 0   F0.0  F1.0  .     .     B1.0  W1    B0.0  W0    U
      stage 1   .     F0.0  F1.0  B1.0  W1    B0.0  W0    .     U
    """
    check_arguments(devices, chunks, defer)
    microbatches = range(len(chunks))

    def order(stage: int) -> list[Task]:
        forward = [task for m in microbatches for task in _forward(stage, m, chunks)]
        return forward + [task for m in reversed(microbatches) for task in _backward(stage, m, chunks)]

    return _follow("gpipe", devices, chunks, order)


def one_f_one_b(devices: Sequence[int], chunks: Sequence[int], *, defer: int | None = None) -> Schedule:
    """Does B of a micro-batch as soon as it can, each followed by its W, and then F of one more (1F1B).

    Stage s of S begins with F of S-s micro-batches, and so holds what F saved of min(M, S-s) of them, where `gpipe` and
    `wavefront` hold all M. Idle share as of `gpipe` for equal stages, one chunk a micro-batch and W counted in B.

    Args:
      devices: index of the device of each stage.
      chunks: number of chunks of each micro-batch, which may differ.
      defer: most tapes a stage may hold; here a stage never holds more than one.

    Returns:
      The schedule.

    References:
      Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (the schedule
      called PipeDream-Flush), arXiv:2104.04473.

    Example:
      >>> print(one_f_one_b((0, 1), (1, 1, 1)))
      tick      0     1     2     3     4     5     6     7     8     9    10    11
      stage 0   F0.0  F1.0  .     B0.0  W0    F2.0  B1.0  W1    .     B2.0  W2    U
      stage 1   .     F0.0  B0.0  W0    F1.0  B1.0  W1    F2.0  B2.0  W2    .     U
    """
    check_arguments(devices, chunks, defer)
    stages, microbatches = len(devices), len(chunks)

    def order(stage: int) -> list[Task]:
        ahead = min(stages - stage, microbatches)
        tasks = [task for m in range(ahead) for task in _forward(stage, m, chunks)]
        for m in range(microbatches):
            tasks += _backward(stage, m, chunks)
            if m + ahead < microbatches:
                tasks += _forward(stage, m + ahead, chunks)
        return tasks

    return _follow("one_f_one_b", devices, chunks, order)


def zero_bubble(
    devices: Sequence[int],
    chunks: Sequence[int],
    *,
    defer: int | None = None,
    times: Callable[[Task], float] | None = None,
) -> Schedule:
    """Does F and B in the order of `one_f_one_b`, and W where a device would idle (ZB-H1).

    What a stage holds is bounded as in the paper's ZB-H1: no stage has more than S micro-batches whose F is done and
    whose W is not, which is what the first stage of `one_f_one_b` has of those whose B is not. With equal stages,
    F = B = W, one chunk a micro-batch and M >= S, a device idles for (S-1)(F+B-W) of a step of
    M (F+B+W) + (S-1)(F+B-W) + U.

    With the seconds of its tasks the step is never longer than that of `one_f_one_b` (where transfers take no time and
    devices share nothing): a device pauses only when it has no W left, so in a stretch of work without a pause it does
    nothing that `one_f_one_b` does not have to do there too, and begins the stretch no later. Without them it counts
    in ticks, and a W put off may be missed where very unequal tasks leave a device idle later.

    Args:
      devices: index of the device of each stage.
      chunks: number of chunks of each micro-batch, which may differ.
      defer: most tapes a stage may hold, at least 1; None: no limit but that of ZB-H1.
      times: seconds of a task; None: as many ticks as it has units, and one for U.

    Returns:
      The schedule.

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.

    Example:
      >>> print(zero_bubble((0, 1), (1, 1, 1)))
      tick      0     1     2     3     4     5     6     7     8     9    10
      stage 0   F0.0  F1.0  .     B0.0  W0    F2.0  B1.0  W1    B2.0  W2    U
      stage 1   .     F0.0  B0.0  F1.0  B1.0  W0    F2.0  B2.0  W1    W2    U
    """
    check_arguments(devices, chunks, defer)
    stages, microbatches = len(devices), len(chunks)
    most = min(stages, microbatches)
    defer = most if defer is None else min(defer, most)
    classic = one_f_one_b(devices, chunks)
    place = {task: i for i, task in enumerate(classic.tasks)}
    critical = [[task for task in order if task.kind in "FB"] for order in classic.by_device().values()]
    previous = {later: earlier for order in critical for earlier, later in pairwise(order)}

    def after(task: Task) -> list[Task]:
        edges = [previous[task]] if task in previous else []
        if task.kind in "FB" and task.units[0].chunk == 0:
            room = stages if task.kind == "F" else defer  # F begins a micro-batch, B completes a tape
            if task.microbatch >= room:
                edges.append(weight_task(task.stage, task.microbatch - room, chunks))
        return edges

    def rank(task: Task) -> tuple[int, int]:
        return max(0, KINDS.index(task.kind) - 1), place[task]  # F and B, W by age, U

    return arrange("zero_bubble", devices, chunks, after=after, rank=rank, defer=defer, times=times)


SCHEDULES: dict[str, Generator] = {
    "serial": serial,
    "wavefront": wavefront,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "zero_bubble": zero_bubble,
}


def _forward(stage: int, microbatch: int, chunks: Sequence[int]) -> list[Task]:
    return [Task("F", stage, (Unit(microbatch, chunk),)) for chunk in range(chunks[microbatch])]


def _backward(stage: int, microbatch: int, chunks: Sequence[int]) -> list[Task]:
    """The Bs of a micro-batch and its W."""
    units = [Unit(microbatch, chunk) for chunk in reversed(range(chunks[microbatch]))]
    return [*(Task("B", stage, (unit,)) for unit in units), weight_task(stage, microbatch, chunks)]


def _follow(name: str, devices: Sequence[int], chunks: Sequence[int], order: Callable[[int], list[Task]]) -> Schedule:
    """The schedule whose stages do F, B and W in the order given; where they share a device, W first, then B."""
    previous = {later: earlier for stage in range(len(devices)) for earlier, later in pairwise(order(stage))}
    return arrange(
        name,
        devices,
        chunks,
        after=lambda task: [previous[task]] if task in previous else [],
        rank=lambda task: ("WBFU".index(task.kind), -task.stage),
        defer=1,
    )


def arrange(
    name: str,
    devices: Sequence[int],
    chunks: Sequence[int],
    *,
    after: Callable[[Task], Iterable[Task]],
    rank: Callable[[Task], Any],
    defer: int,
    times: Callable[[Task], float] | None = None,
) -> Schedule:
    """Builds a schedule by list scheduling: each device always does the ready task of lowest rank.

    A task is ready when what it needs is done.

    Args:
      name: of the schedule.
      devices: index of the device of each stage.
      chunks: number of chunks of each micro-batch.
      after: the tasks that must precede a task by the schedule's choice, beside its dependencies.
      rank: sorts the ready tasks of a device.
      defer: most tapes a stage may hold; `after` has to see to it.
      times: seconds of a task; None: as many ticks as it has units (W joins several), and one for U.

    Returns:
      The schedule, its tasks in the order in which they start.

    Raises:
      InputError: `after` names a task that is not there, or its edges and the dependencies form a cycle.

    Example:
      >>> backward_first = lambda task: ("BFWU".index(task.kind), task.units)
      >>> print(arrange("eager", (0,), (1, 1), after=lambda task: (), rank=backward_first, defer=2))
      tick      0     1     2     3     4     5     6
      stage 0   F0.0  B0.0  F1.0  B1.0  W0    W1    U
    """
    tasks = work(len(devices), chunks)
    place = {task: i for i, task in enumerate(tasks)}
    needs = {BARRIER: {place[task] for task in tasks if task.kind == "W"}}
    for i, task in enumerate(tasks):
        needs[i] = {BARRIER} if task.kind == "U" else {place[need] for need in needs_of(len(devices), chunks, task)}
        for other in after(task):
            if other not in place:
                raise InputError(
                    f"schedule {name!r} puts {task} after {tuple(other)}, which is not a task of its {len(devices)} "
                    f"stages and chunks {tuple(chunks)}: remove this edge from `after`"
                )
            needs[i].add(place[other])
    order = _list_schedule(tasks, needs, devices, rank, times or (lambda task: len(task.units) or 1))
    if len(order) < len(tasks):
        _report_cycle(name, tasks, needs, set(order))
    return Schedule(name, tuple(devices), tuple(chunks), tuple(tasks[i] for i in order), defer)


BARRIER = -1  # a task of no device and no time between every W and every U, instead of an edge from each to each


def _list_schedule(
    tasks: Sequence[Task],
    needs: Mapping[int, set[int]],
    devices: Sequence[int],
    rank: Callable[[Task], Any],
    seconds: Callable[[Task], float],
) -> list[int]:
    """The tasks (their indices) in the order in which they start; those that wait for one another are left out."""
    waiting = {i: len(need) for i, need in needs.items()}
    followers: dict[int, list[int]] = defaultdict(list)
    for i, need in needs.items():
        for other in need:
            followers[other].append(i)
    ready: dict[int, list[tuple[Any, int]]] = {device: [] for device in sorted(set(devices))}
    running: list[tuple[float, int]] = []  # by end
    idle, order, now = set(ready), [], 0.0

    def release(i: int) -> None:
        if i == BARRIER:
            finish(i)
        else:
            heapq.heappush(ready[devices[tasks[i].stage]], (rank(tasks[i]), i))

    def finish(i: int) -> None:
        for follower in followers[i]:
            waiting[follower] -= 1
            if not waiting[follower]:
                release(follower)

    for i in [i for i, count in waiting.items() if not count]:
        release(i)
    while True:
        for device in sorted(idle):  # (1) every idle device begins its first ready task
            if ready[device]:
                i = heapq.heappop(ready[device])[-1]
                order.append(i)
                idle.remove(device)
                heapq.heappush(running, (now + seconds(tasks[i]), i))
        if not running:
            return order
        now = running[0][0]
        while running and running[0][0] == now:  # (2) what ends next frees its device and what waited for it
            i = heapq.heappop(running)[-1]
            idle.add(devices[tasks[i].stage])
            finish(i)


def _report_cycle(name: str, tasks: Sequence[Task], needs: Mapping[int, set[int]], done: set[int]) -> None:
    stuck = next(i for i in range(len(tasks)) if i not in done)
    missing = min(tasks[need] for need in needs[stuck] if need not in done)
    raise InputError(
        f"schedule {name!r} never runs {tasks[stuck]}: it waits for {missing}, which never runs either: "
        "remove an edge of `after`"
    )
