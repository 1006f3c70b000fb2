"""The search for the plan of least predicted step time.

What may vary is the number of stages, the partition, the schedule, and for each bucket its chunks and micro-batches.
For each number of stages and each schedule (1) the cuttings of every bucket are timed for many partitions in one pass
(`flow.py`); (2) each partition takes for each bucket the fastest cutting that fits the memory; (3) the partition of
least time wins, buckets counting by their shares.

Where there are at most `FEW` contiguous partitions all are tried, so the answer is exact. Where there are more, the
search begins with the partitions whose largest stage is least, with and without what fills the pipeline, and
moves single rows over single boundaries as long as this helps: a local optimum. Where devices share a processor, the
pass works with times halfway between those alone and those beside busy devices, and the best few are simulated as they
are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mp_lstm.errors import InputError
from mp_lstm.planning.explain import Choice
from mp_lstm.planning.partition import least, neighbours, splits
from mp_lstm.planning.plan import BucketPlan, Plan
from mp_lstm.planning.rating import (
    Cuts,
    Problem,
    exact_peaks,
    exact_seconds,
    pressures,
    row_sums,
    seconds,
    stage_arrays,
    stage_bytes,
)

FEW = 1000  # contiguous partitions that are all tried
CLIMBS = 200  # moves of a row at most
SIMULATED = 6  # partitions, and cuttings of each, that are simulated where devices share a processor
TIE = 1e-9  # relative difference below which times are equal


class Candidate(NamedTuple):
    """A plan that fits.

    Args:
      ends: where its stages begin, and the number of rows.
      schedule: name of its schedule.
      cuts: of each bucket.
      seconds: predicted time of a step, the mean over the buckets by their shares.
    """

    ends: tuple[int, ...]
    schedule: str
    cuts: dict[int, BucketPlan]
    seconds: float

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.ends) - 1


def search(problem: Problem) -> Plan | None:
    """Finds the fastest plan that fits.

    Args:
      problem: what is to be found.

    Returns:
      The plan with what it was chosen over; None where nothing fits.

    Raises:
      InputError: no partition puts every row on a device it may be on.
    """
    found: dict[tuple[int, str], Candidate] = {}
    placeable = False
    for stages in problem.stages:
        for schedule in problem.schedules:
            cuts = problem.cuts(stages, schedule)
            starts = _starts(problem, stages, schedule, cuts) if all(cuts.values()) else np.zeros((0, stages + 1), int)
            placeable = placeable or len(starts) > 0
            candidate = _fastest(problem, schedule, starts, cuts) if len(starts) else None
            if candidate is not None:
                found[stages, schedule] = candidate
    if not placeable:
        raise InputError(
            "pins leave no place for some rows: a pinned row needs a stage on its device, and stages follow the order "
            "of devices: reorder devices, or drop a pin"
        )
    if not found:
        return None
    chosen, compared = _settled(problem, found)
    plan = problem.make(chosen.ends, chosen.schedule, chosen.cuts)
    return replace(plan, choices=tuple(_choice(problem, *one) for one in compared))


def _settled(
    problem: Problem, found: dict[tuple[int, str], Candidate]
) -> tuple[Candidate, list[tuple[str, Candidate | None]]]:
    """The fastest candidate and what it is compared with, none of which is faster.

    One may be, before it is taken, where the search tried only some partitions or simulated only some cuttings.
    """
    least_stages = max(stages for stages, _ in found) if problem.every else 1

    def fastest_of(candidates: Iterable[Candidate | None]) -> Candidate:
        return _first_least([one for one in candidates if one is not None and one.stages >= least_stages])

    chosen = fastest_of(found.values())
    while True:
        compared = list(_compared(problem, chosen, found))
        fastest = fastest_of(candidate for _, candidate in compared)
        if fastest.seconds >= chosen.seconds * (1 - TIE):
            return chosen, compared
        chosen = found[fastest.stages, fastest.schedule] = fastest


def shortage(problem: Problem) -> tuple[float, Any, float]:
    """Finds what lacks least: the bytes, the device, and what it would have to hold.

    Args:
      problem: one without a plan that fits.
    """
    best: tuple[float, Any, float] = math.inf, None, 0.0
    for stages in problem.stages:
        for schedule in problem.schedules:
            cuts = problem.cuts(stages, schedule)
            if not all(cuts.values()):
                continue
            for ends in _starts(problem, stages, schedule, cuts, roomy=True):
                short = [_exact_lack(problem, ends, schedule, options) for options in cuts.values()]
                best = min(best, max(short, key=lambda lack: lack[0]), key=lambda lack: lack[0])
    return best


def _exact_lack(problem: Problem, ends: Any, schedule: str, options: Sequence[BucketPlan]) -> tuple[float, Any, float]:
    """What lacks with the cutting of a bucket that needs least: bytes, device, and what it would have to hold."""
    lacks = []
    for cut in options:
        plan = problem.make(ends, schedule, {cut.length: cut})
        peaks = exact_peaks(problem, plan, cut.length)
        by_device = [
            (peaks[index] - size, device, peaks[index])
            for index, device in zip(plan.device_indices, plan.devices, strict=True)
            if (size := problem.capacity(device)) is not None
        ]
        lacks.append(max(by_device, key=lambda lack: lack[0]))
    return min(lacks, key=lambda lack: lack[0])


def _first_least(candidates: Sequence[Candidate]) -> Candidate:
    """The first of those that are as fast as the fastest."""
    fastest = min(candidate.seconds for candidate in candidates)
    return next(candidate for candidate in candidates if candidate.seconds <= fastest * (1 + TIE))


# Partitions


def _starts(problem: Problem, stages: int, schedule: str, cuts: Cuts, *, roomy: bool = False) -> np.ndarray:
    """[K, S+1] the partitions to begin with: all of them where they are few. `roomy`: only what lacks least memory."""
    rows = len(problem.plan.rows)
    if problem.partition is not None:
        ends = np.concatenate([[0], np.cumsum(problem.partition)])[None]
    elif math.comb(rows - 1, stages - 1) <= FEW and not roomy:
        ends = splits(rows, stages)
    else:
        ends = _seeds(problem, stages, schedule, cuts, roomy)
    return ends[_allowed(problem, ends)]


def _allowed(problem: Problem, ends: np.ndarray) -> np.ndarray:
    """[K] whether a partition has every row on a device that it may be on."""
    barred = np.concatenate([np.zeros((1, problem.allowed.shape[1]), int), (~problem.allowed).cumsum(axis=0)])
    stages = np.arange(ends.shape[1] - 1)
    return (barred[ends[:, 1:], stages] == barred[ends[:, :-1], stages]).all(axis=1)


def _seeds(problem: Problem, stages: int, schedule: str, cuts: Cuts, roomy: bool) -> np.ndarray:
    """The partitions of least largest stage; where memory is checked and none fits, the one that lacks least."""
    rows = len(problem.plan.rows)
    first, last = np.meshgrid(np.arange(rows), np.arange(rows + 1), indexing="ij")
    middle = {length: _middle(options) for length, options in cuts.items()}
    barred = np.concatenate([np.zeros((1, problem.allowed.shape[1]), int), (~problem.allowed).cumsum(axis=0)])

    def place(stage: int) -> np.ndarray:
        possible = (first < last) & (barred[last, stage] == barred[first, stage])
        return np.where(possible, 0.0, np.inf)

    def lack(stage: int) -> np.ndarray:
        size = problem.capacity(problem.plan.devices[stage])
        if size is None:
            return place(stage) - 1.0
        held = []
        for cut in middle.values():
            fixed, moving = stage_bytes(problem, pressures(problem, schedule, stages, cut)[stage], cut, first, last)
            held.append(fixed + moving)
        return place(stage) + np.max(held, axis=0) - size

    def load(stage: int, *, filled: bool) -> np.ndarray:
        work, fill = np.zeros(rows + 1), np.zeros(rows + 1)
        for length, cut in middle.items():
            sums = {kind: row_sums(problem, kind, cut, stage, busy=False) for kind in ("F", "B", "W", "U")}
            unit = problem.shares[length] * (sums["F"] + sums["B"])
            work += cut.chunks * cut.microbatches * unit
            work += problem.shares[length] * (cut.microbatches * sums["W"] + sums["U"])
            fill += unit
        full = place(stage) + work[last] - work[first] + filled * fill[first]
        return np.where(lack(stage) > 0, np.inf, full) if problem.checks_memory else full

    # With few units what fills the pipeline outweighs the work, and says nothing of stages that come early.
    loads = [functools.partial(load, filled=filled) for filled in (False, True)]
    made = [] if roomy and problem.checks_memory else [least(one, stages) for one in loads]
    if problem.checks_memory and not any(math.isfinite(worst) for _, worst in made):
        made.append(least(lack, stages))
    made = [partition for partition, worst in made if math.isfinite(worst)]
    return np.array([[0, *np.cumsum(partition)] for partition in made], np.int64).reshape(len(made), stages + 1)


def _middle(cuts: Sequence[BucketPlan]) -> BucketPlan:
    """A cutting that stands for the others where a partition is to be guessed."""
    return min(cuts, key=lambda cut: abs(cut.chunks * cut.microbatches - 4))


# The fastest of a number of stages and a schedule


def _fastest(problem: Problem, schedule: str, starts: np.ndarray, cuts: Cuts) -> Candidate | None:
    """The fastest candidate: of all partitions, or from a start uphill."""
    stages = starts.shape[1] - 1
    candidate = _best(problem, schedule, starts, cuts)
    if candidate is None or problem.partition is not None or math.comb(len(problem.plan.rows) - 1, stages - 1) <= FEW:
        return candidate
    for _ in range(CLIMBS):
        moved = neighbours(np.array(candidate.ends))
        moved = moved[_allowed(problem, moved)]
        fixed = {length: (cut,) for length, cut in candidate.cuts.items()}
        better = _best(problem, schedule, moved, fixed) if len(moved) else None
        if better is None or better.seconds >= candidate.seconds * (1 - TIE):
            break
        candidate = better
    again = _best(problem, schedule, np.array([candidate.ends]), cuts)
    return again if again is not None and again.seconds < candidate.seconds * (1 - TIE) else candidate


def _best(problem: Problem, schedule: str, ends: np.ndarray, cuts: Cuts) -> Candidate | None:
    """The fastest candidate of K partitions."""
    sharing = bool(problem.shares_host(ends.shape[1] - 1).any())
    best, certain = _best_of(problem, schedule, ends, cuts, prune=True, sharing=sharing)
    # What was left out as no faster may fit where the faster one does not.
    return best if certain else _best_of(problem, schedule, ends, cuts, prune=False, sharing=sharing)[0]


def _best_of(
    problem: Problem, schedule: str, ends: np.ndarray, cuts: Cuts, *, prune: bool, sharing: bool
) -> tuple[Candidate | None, bool]:
    """The fastest candidate, those that look fastest being looked at first; and whether all of these did fit."""
    times = seconds(problem, schedule, ends, cuts, prune=prune)
    total = np.sum([problem.shares[length] * rated.min(axis=0) for length, rated in times.items()], axis=0)
    best: Candidate | None = None
    certain = not (sharing and problem.checks_memory)
    for tried, k in enumerate(np.argsort(total, kind="stable").tolist()):
        if not math.isfinite(total[k]) or (sharing and best is not None and tried >= SIMULATED):
            break
        if best is not None and not sharing and total[k] >= best.seconds * (1 - TIE):
            break
        candidate = _cut(problem, schedule, ends[k], cuts, {length: rated[:, k] for length, rated in times.items()})
        certain = certain and candidate is not None and (sharing or candidate.seconds <= total[k] * (1 + TIE))
        if candidate is not None and (best is None or candidate.seconds < best.seconds * (1 - TIE)):
            best = candidate
    return best, certain


def _cut(
    problem: Problem, schedule: str, ends: np.ndarray, cuts: Cuts, times: dict[int, np.ndarray]
) -> Candidate | None:
    """The candidate of a partition: for each bucket its fastest cutting that fits; None where none does."""
    sharing = bool(problem.shares_host(len(ends) - 1).any())
    taken: dict[int, BucketPlan] = {}
    whole = 0.0
    for length, options in cuts.items():
        fitting = _fitting(problem, schedule, ends, options, times[length])
        if sharing:
            some = [cut for (_, cut), _ in zip(fitting, range(SIMULATED), strict=False)]
            rated = [(exact_seconds(problem, problem.make(ends, schedule, {length: cut}), length), cut) for cut in some]
            best = min(rated, key=lambda one: one[0], default=None)
        else:
            best = next(fitting, None)
        if best is None:
            return None
        whole += problem.shares[length] * best[0]
        taken[length] = best[1]
    return Candidate(tuple(ends.tolist()), schedule, taken, float(whole))


def _fitting(
    problem: Problem, schedule: str, ends: np.ndarray, options: Sequence[BucketPlan], times: np.ndarray
) -> Iterator[tuple[float, BucketPlan]]:
    """The cuttings of a bucket that fit, the fastest first; of those as fast, in order of preference."""
    left = [option for option in range(len(options)) if math.isfinite(times[option])]
    while left:
        fastest = min(times[option] for option in left)
        option = next(option for option in left if times[option] <= fastest * (1 + TIE))
        left.remove(option)
        if _fits(problem, schedule, ends, options[option]):
            yield float(times[option]), options[option]


def _fits(problem: Problem, schedule: str, ends: np.ndarray, cut: BucketPlan) -> bool:
    return not problem.checks_memory or _exact_lack(problem, ends, schedule, (cut,))[0] <= 0


# What the chosen plan is compared with


def _compared(
    problem: Problem, chosen: Candidate, found: dict[tuple[int, str], Candidate]
) -> Iterator[tuple[str, Candidate | None]]:
    """The chosen candidate and the best that differ in one respect; None for what does not fit."""
    sizes = "+".join(str(size) for size in np.diff(chosen.ends).tolist())
    yield f"{_count(chosen.stages, 'stage')} ({sizes if chosen.stages <= 8 else '...'}), {chosen.schedule}", chosen
    for stages in problem.stages:
        if stages != chosen.stages:
            same = [candidate for (number, _), candidate in found.items() if number == stages]
            yield _count(stages, "stage"), _first_least(same) if same else None
    for schedule in problem.schedules:
        if schedule != chosen.schedule and all(problem.cuts(chosen.stages, schedule).values()):
            yield f"schedule {schedule}", found.get((chosen.stages, schedule))
    yield from _other_cuts(problem, chosen)
    if problem.partition is None and chosen.stages > 1:
        yield from _other_partitions(problem, chosen)


def _other_cuts(problem: Problem, chosen: Candidate) -> Iterator[tuple[str, Candidate | None]]:
    """The same partition and schedule with one number of chunks, or of micro-batches, for all buckets."""
    cuts, ends = problem.cuts(chosen.stages, chosen.schedule), np.array([chosen.ends])
    for name, word in (("chunks", "chunk"), ("microbatches", "micro-batch")):
        used = {getattr(cut, name) for cut in chosen.cuts.values()}
        for number in sorted({getattr(cut, name) for options in cuts.values() for cut in options}):
            some = {
                length: tuple(cut for cut in options if getattr(cut, name) == number)
                for length, options in cuts.items()
            }
            if used != {number} and all(some.values()):
                yield _count(number, word), _best(problem, chosen.schedule, ends, some)


def _other_partitions(problem: Problem, chosen: Candidate) -> Iterator[tuple[str, Candidate | None]]:
    """The fastest two of the partitions that move one row."""
    cuts, moved = {length: (cut,) for length, cut in chosen.cuts.items()}, neighbours(np.array(chosen.ends))
    moved = moved[_allowed(problem, moved)]
    times = seconds(problem, chosen.schedule, moved, cuts, prune=False) if len(moved) else {}
    total = sum(problem.shares[length] * rated[0] for length, rated in times.items())
    for k in np.argsort(total, kind="stable")[:2] if len(moved) else ():
        sizes = "+".join(map(str, np.diff(moved[k]).tolist()))
        what = f"partition {sizes}" if chosen.stages <= 8 else "a row moved"
        yield what, _best(problem, chosen.schedule, moved[k : k + 1], cuts)


def _choice(problem: Problem, what: str, candidate: Candidate | None) -> Choice:
    """A candidate in numbers."""
    if candidate is None:
        return Choice(what, math.inf, 0.0, 1, fits=False)
    ends, work = np.array([candidate.ends]), 0.0
    for length, cut in candidate.cuts.items():
        tasks = stage_arrays(problem, ends, cut).tasks.sum(axis=(1, 2))
        work += problem.shares[length] * float(tasks @ _times_done(cut))
    plan = problem.make(candidate.ends, candidate.schedule, candidate.cuts)
    peak = max(max(exact_peaks(problem, plan, length).values()) for length in candidate.cuts)
    return Choice(what, candidate.seconds, work, len(set(plan.device_indices)), peak)


def _times_done(cut: BucketPlan) -> np.ndarray:
    """How often a step does each of F, B, W and U."""
    units = cut.chunks * cut.microbatches
    return np.array([units, units, cut.microbatches, 1])


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("batch") else "s"
    return f"{number} {word}{'' if number == 1 else plural}"
