"""What is to be planned, and how its candidates are rated: seconds and bytes of many partitions at once.

Everything here is an array over K partitions, from prefix sums over the rows: what a stage takes or holds is the
difference of two entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mp_lstm.planning.costs import STATE_BYTES, CostModel, Kind
from mp_lstm.planning.flow import Flow, StageArrays, bound
from mp_lstm.planning.memory import peak_bytes
from mp_lstm.planning.plan import BucketPlan, Plan
from mp_lstm.planning.prediction import between_tasks, predict, run_again, stage_memory
from mp_lstm.planning.schedule import validate
from mp_lstm.planning.schedules import Generator

Cuts = Mapping[int, Sequence[BucketPlan]]  # the cuttings of each bucket, by length, in order of preference


@dataclass(frozen=True)
class Problem:
    """What is to be planned, and what is fixed.

    Args:
      plan: with the model's rows, all devices, the batch size and remat; the rest is to be found.
      model: the model.
      costs: of its tasks.
      shares: how often each bucket occurs, by length; they add up to 1.
      stages: the numbers of stages to try, increasing.
      partition: rows of each stage; None: to be found.
      schedules: those to try by name, in order of preference.
      cuts: (number of stages, schedule) -> the cuttings to try.
      limit: bytes that may be used on a device, if it has that many; None: all it has.
      allowed: [R, devices] whether a row may be on a device.
      every: choose among plans with as many stages as can be; those with fewer are only compared.
    """

    plan: Plan
    model: Any
    costs: CostModel
    shares: Mapping[int, float]
    stages: Sequence[int]
    partition: tuple[int, ...] | None
    schedules: Mapping[str, Generator]
    cuts: Callable[[int, str], Cuts]
    limit: int | None
    allowed: np.ndarray
    every: bool = False
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of a key, made when it is first asked for."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def capacity(self, device: Any) -> int | None:
        """Bytes of a device that may be used; None: any."""
        known = [size for size in (self.limit, self.costs.capacity(device)) if size is not None]
        return min(known, default=None)

    @property
    def checks_memory(self) -> bool:
        """Whether the memory of any device is known."""
        devices = self.plan.devices
        return self.once("memory", lambda: any(self.capacity(device) is not None for device in devices))

    def indices(self, stages: int) -> tuple[int, ...]:
        """The device index of each of the first stages."""
        return self.once("indices", lambda: self.plan.device_indices)[:stages]

    def shares_host(self, stages: int) -> np.ndarray:
        """[S] whether a stage's device shares its processor with that of another of the first stages."""
        indices, devices = self.indices(stages), self.plan.devices
        hosts = [self.costs.host(device) for device in devices[:stages]]
        return np.array(
            [
                any(hosts[a] == hosts[b] and indices[a] != indices[b] for b in range(stages) if b != a)
                for a in range(stages)
            ]
        )

    def make(self, ends: Sequence[int] | np.ndarray, schedule: str, cuts: Mapping[int, BucketPlan]) -> Plan:
        """The plan of a partition, a schedule and a cutting for each bucket."""
        sizes = tuple(np.diff(ends).tolist())
        plan = replace(
            self.plan,
            partition=sizes,
            devices=self.plan.devices[: len(sizes)],
            buckets=dict(cuts),
            schedule_name=schedule,
            generator=self.schedules[schedule],
        )
        for cut in cuts.values():
            plan.remember(self.flow(len(sizes), schedule, cut).schedule)
        return plan

    def flow(self, stages: int, schedule: str, cut: BucketPlan) -> Flow:
        """The schedule of one batch, compiled."""
        chunks = (cut.chunks,) * cut.microbatches

        def make() -> Flow:
            made = self.schedules[schedule](self.indices(stages), chunks)
            validate(made)
            return Flow(made)

        return self.once(("flow", stages, schedule, chunks), make)


def seconds(problem: Problem, schedule: str, ends: np.ndarray, cuts: Cuts, *, prune: bool) -> dict[int, np.ndarray]:
    """Times all cuttings of all buckets for K partitions.

    Args:
      problem: the problem.
      schedule: name of the schedule.
      ends: [K, S+1] the partitions.
      cuts: the cuttings.
      prune: leave out a cutting where a bound tells that it is no faster than another.

    Returns:
      By length [cuttings, K] seconds of a step; infinite for what was left out or holds more than there is memory.
    """
    return {length: _bucket_seconds(problem, schedule, ends, options, prune) for length, options in cuts.items()}


def _bucket_seconds(
    problem: Problem, schedule: str, ends: np.ndarray, cuts: Sequence[BucketPlan], prune: bool
) -> np.ndarray:
    times = [stage_arrays(problem, ends, cut) for cut in cuts]
    owned = len(set(problem.indices(ends.shape[1] - 1))) == ends.shape[1] - 1
    bounds = [
        bound(one, cut.chunks, cut.microbatches) if owned else np.zeros(len(ends))
        for one, cut in zip(times, cuts, strict=True)
    ]
    rated = np.full((len(cuts), len(ends)), np.inf)
    for option in sorted(range(len(cuts)), key=lambda option: bounds[option].min()):
        worth = bounds[option] < rated.min(axis=0) if prune else np.full(len(ends), True)
        if problem.checks_memory and worth.any():  # no schedule holds less than a micro-batch: that needs none
            worth &= lacking(problem, None, ends, cuts[option]) <= 0
            if worth.any():
                worth &= lacking(problem, schedule, ends, cuts[option]) <= 0
        if worth.any():
            made = problem.flow(ends.shape[1] - 1, schedule, cuts[option]).makespans(times[option])
            rated[option] = np.where(worth, made, np.inf)
    return rated


def stage_arrays(problem: Problem, ends: np.ndarray, cut: BucketPlan) -> StageArrays:
    """The times of the stages of K partitions.

    Args:
      problem: the problem.
      ends: [K, S+1] the partitions.
      cut: of the bucket.

    Returns:
      The times. Where devices share a processor they are halfway between those alone and those beside busy ones.
    """
    stages = ends.shape[1] - 1
    shared, tasks = problem.shares_host(stages), np.empty((4, stages, len(ends)))
    for stage in range(stages):
        overhead = problem.costs.overhead(problem.plan.devices[stage])
        for kind, name in enumerate(("F", "B", "W", "U")):
            sums = row_sums(problem, name, cut, stage, busy=bool(shared[stage]))
            tasks[kind, stage] = sums[ends[:, stage + 1]] - sums[ends[:, stage]] + overhead
    links = np.empty((2, stages - 1, len(ends)))
    for stage in range(stages - 1):
        links[:, stage] = _links(problem, cut, stage)[:, ends[:, stage + 1] - 1]
    return StageArrays(tasks, links, problem.once(("norms", stages), lambda: _norms(problem, stages)))


def row_sums(problem: Problem, kind: Kind, cut: BucketPlan, stage: int, *, busy: bool) -> np.ndarray:
    """[R+1] seconds that the first rows take on a stage's device."""
    rows, costs, device = cut.rows_per_microbatch, problem.costs, problem.plan.devices[stage]
    time, indices = cut.chunk * cut.chunks if kind in "WU" else cut.chunk, range(len(problem.plan.rows))

    def seconds_of(kind: Kind) -> np.ndarray:
        taken = np.array([costs.seconds(kind, row, rows, time, device) for row in indices])
        return taken.mean(axis=1) if busy else taken[:, 0]

    def make() -> np.ndarray:
        taken, again = seconds_of(kind), run_again(costs, problem.plan.remat, indices)
        if kind == "B" and any(again):
            taken = taken + np.where(again, seconds_of("F"), 0.0)
        return np.concatenate([[0.0], np.cumsum(taken)])

    return problem.once(("row", kind, rows, time, problem.indices(stage + 1)[stage], busy), make)


def _links(problem: Problem, cut: BucketPlan, stage: int) -> np.ndarray:
    """[2, R] seconds until y of a row has gone from a stage up to the next, and its gradient down."""
    rows, chunk, (below, above) = cut.rows_per_microbatch, cut.chunk, problem.plan.devices[stage : stage + 2]
    costs = problem.costs

    def make() -> np.ndarray:
        sizes = [costs.memory(row, rows, chunk).output for row in range(len(problem.plan.rows))]
        known = {size: (costs.transfer(size, below, above), costs.transfer(size, above, below)) for size in set(sizes)}
        return np.array([known[size] for size in sizes]).T

    return problem.once(("links", rows, chunk, stage), make)


def _norms(problem: Problem, stages: int) -> np.ndarray:
    devices, indices = problem.plan.devices, problem.indices(stages)
    return np.array(
        [
            [
                problem.costs.transfer(STATE_BYTES, devices[a], devices[b]) if indices[a] != indices[b] else 0.0
                for b in range(stages)
            ]
            for a in range(stages)
        ]
    )


def lacking(problem: Problem, schedule: str | None, ends: np.ndarray, cut: BucketPlan) -> np.ndarray:
    """[K] bytes that some device of a partition lacks at least; not above 0 where none may be lacking."""
    stages = ends.shape[1] - 1
    indices = np.array(problem.indices(stages))
    pressure = pressures(problem, schedule, stages, cut)
    held = [
        stage_bytes(problem, moments, cut, first, last)
        for moments, first, last in zip(pressure, ends.T[:-1], ends.T[1:], strict=True)
    ]
    short = np.full(len(ends), -np.inf)
    for stage, (_, moving) in enumerate(held):
        size = problem.capacity(problem.plan.devices[stage])
        if size is not None:
            # Stages of one device need not be fullest at once: their moving parts are not added up.
            on_device = sum(held[other][0] for other in np.flatnonzero(indices == indices[stage]))
            short = np.maximum(short, on_device + moving - size)
    return short


def pressures(problem: Problem, schedule: str | None, stages: int, cut: BucketPlan) -> list[np.ndarray]:
    """For each stage [E, 3] units of saved, kept and tape held at its fullest; None: what every schedule holds.

    That is a micro-batch, when the last of its Fs is done, and the last of its Bs.
    """
    if schedule is not None:
        return problem.flow(stages, schedule, cut).pressure
    return [np.array([(cut.chunks, cut.chunks, 0), (0, cut.chunks, cut.chunks)])] * stages


def stage_bytes(
    problem: Problem, pressure: np.ndarray, cut: BucketPlan, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What a stage of the rows first to last-1 holds always, and beside it at its fullest, without temporaries."""
    rows = cut.rows_per_microbatch
    sums, inputs = problem.once(("bytes", rows, cut.chunk), lambda: _row_bytes(problem, rows, cut.chunk))
    fixed, *unit = (part[last] - part[first] for part in sums)
    if problem.plan.remat != "layer":  # there every row keeps its own
        unit[1] = unit[1] + inputs[first]
    moments = [sum(n * part for n, part in zip(event, unit, strict=True)) for event in pressure.tolist()]
    return fixed, np.max(moments, axis=0)


def _row_bytes(problem: Problem, rows: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """[4, R+1] sums over the first rows of what is fixed, saved, kept and on the tape; [R+1] of each row's input."""
    costs, remat = problem.costs, problem.plan.remat
    indices = range(len(problem.plan.rows))
    held = [costs.memory(row, rows, chunk) for row in indices]
    again = run_again(costs, remat, indices)
    parts = np.array(
        [(row.parameters + row.state, *between_tasks(row, runs)) for row, runs in zip(held, again, strict=True)],
        np.float64,
    )
    if remat == "layer":
        parts[:, 2] += [row.input for row in held]
    sums = np.concatenate([np.zeros((1, 4)), parts.cumsum(axis=0)]).T
    return sums, np.array([*(row.input for row in held), 0], np.float64)


def exact_peaks(problem: Problem, plan: Plan, length: int) -> dict[int, int]:
    """The most bytes that each device holds in a step on a batch of a bucket."""
    cut = plan.buckets[length]

    def make() -> dict[int, int]:
        held = [stage_memory(problem.costs, indices, cut, plan.remat) for indices in plan.stages]
        return peak_bytes(plan.schedule((length,)), [[memory] * cut.microbatches for memory in held])

    return problem.once(("peak", plan.partition, plan.schedule_name, cut), make)


def exact_seconds(problem: Problem, plan: Plan, length: int) -> float:
    """The simulated time of a step on a batch of a bucket."""
    key = "seconds", plan.partition, plan.schedule_name, plan.buckets[length]
    return problem.once(key, lambda: predict(plan, problem.model, problem.costs, length).makespan)
