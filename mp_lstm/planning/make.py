"""Making a plan: what the user fixed is checked, and the rest searched for.

A plan fixed in every respect costs no search. Errors of `make_plan`'s arguments are all found here.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import numpy as np

from mp_lstm.errors import InputError
from mp_lstm.planning.calibration import default_calibration
from mp_lstm.planning.checks import positive
from mp_lstm.planning.costs import Cost, CostModel
from mp_lstm.planning.explain import Choice
from mp_lstm.planning.group import Group, group_shape, grouped
from mp_lstm.planning.grouped import DIVIDED, costs_of
from mp_lstm.planning.partition import check_partition, check_stages
from mp_lstm.planning.plan import BucketPlan, Plan, PlannedModel, Remat, Row
from mp_lstm.planning.rating import Cuts, Problem
from mp_lstm.planning.schedules import SCHEDULES, Generator
from mp_lstm.planning.search import search, shortage

MOST_CHUNKS = 8  # tried for a bucket; beyond it the weights read again outweigh what the pipeline gains
MICROBATCHES = (1, 2, 4)  # tried where there is more than one stage
MOST_COUNTS = 8  # numbers of stages that are all tried; of more, the powers of two and the largest


def make_plan(
    model: PlannedModel,
    *,
    batch_size: SupportsIndex,
    lengths: Sequence[SupportsIndex],
    devices: Sequence[Any],
    stages: SupportsIndex | None = None,
    partition: Sequence[SupportsIndex] | Literal["auto"] | None = None,
    schedule: str | Generator | None = None,
    chunk: SupportsIndex | None = None,
    microbatches: SupportsIndex | None = None,
    memory_limit: float | None = None,
    remat: Remat | None = "none",
    pins: Mapping[str | int, Any] | None = None,
    costs: CostModel | None = None,
    weights: Mapping[int, float] | None = None,
    devices_per_stage: SupportsIndex | None = None,
    data_parallel: SupportsIndex | None = None,
    model_parallel: SupportsIndex = 1,
) -> Plan:
    """Plans how a model trains over devices. What is None is searched for, to make the predicted step time least.

    Args:
      model: has `rows`, the layers that can be placed.
      batch_size: rows of a batch.
      lengths: the buckets' lengths in time steps, in any order.
      devices: one (or a group) for each stage, in order; given twice it holds two stages. Those beyond `stages` stay
        unused.
      stages: number of stages; None: those of `partition`, else searched, at most one a device and a row. Without
        `costs` every device gets one: nominal costs are no ground to leave a device idle.
      partition: rows of each stage; None or "auto": searched.
      schedule: a name of `SCHEDULES`, or a function like those there; None: searched.
      chunk: time steps of a chunk, in buckets that are longer; None: for each bucket 1 to 8 chunks are tried.
      microbatches: slices of a batch's rows; None: for each bucket 1, 2 and 4 are tried.
      memory_limit: bytes that may be used on each device, if it has as many; None: all that `costs` knows of.
      remat: what is computed again instead of kept: "none"; the "head"'s logits, block by block; also each "layer"'s
        activations, in B; or the whole "stage"'s. None: as much as it takes to fit the memory.
      pins: row's name or index -> the device it must be on.
      costs: of the model's tasks, measured or calibrated; None: each device is one core of a server CPU.
      weights: length -> how often it occurs; None: all equally often.
      devices_per_stage: devices that work on a stage together, consecutive ones; None: what the next two need.
      data_parallel: parts into which they divide the rows of a micro-batch; None: as many as there are devices for.
      model_parallel: parts into which they divide the vocabulary: the embedding's rows, the head's columns.

    Returns:
      The plan. Equal arguments give equal plans; `plan.explain()` tells what it was chosen over.

    Raises:
      InputError: an argument is out of range, two of them do not agree, or no plan fits the memory.

    Example:
      >>> from collections import namedtuple
      >>> Layer = namedtuple("Layer", "name kind chunkable cost")
      >>> cost = lambda batch_size, time: Cost(*[1e7 * batch_size * time] * 3, 1_000_000, 4_000_000, 0, 6400 * time)
      >>> model = namedtuple("Model", "rows")([Layer(f"lstm {i}", "lstm", True, cost) for i in (1, 2)])
      >>> print(make_plan(model, batch_size=20, lengths=(32, 8), devices=("cpu:0", "cpu:1")))
      stage  device  row     kind  parameters   share
          0  cpu:0   lstm 1  lstm   1,000,000   50.0%
          1  cpu:1   lstm 2  lstm   1,000,000   50.0%
                     total          2,000,000  100.0%
      <BLANKLINE>
      bucket  chunk  chunks  micro-batches  rows each  schedule
           8      4       2              2         10  zero_bubble
          32      8       4              2         10  zero_bubble
    """
    size = positive("batch_size", batch_size)
    ordered = _check_lengths(lengths)
    data, parts = group_shape(devices_per_stage, data_parallel, model_parallel)
    placed = grouped(_several("devices", devices, "devices=jax.devices()"), data, parts)
    kinds = [layer.kind for layer in model.rows]
    _check_divided(kinds, parts)
    counts, sizes = _check_stages(len(model.rows), placed, stages, partition)
    cutting = _check_cutting(model, size, ordered, chunk, microbatches)
    named = _check_schedule(schedule, cutting)
    problem = Problem(
        plan=Plan(_rows(model, size, ordered[-1]), (), placed, size, {}, ""),
        model=model,
        costs=default_calibration().costs(model) if costs is None else costs,
        shares=_check_weights(weights, ordered),
        stages=counts,
        partition=sizes,
        schedules=named,
        cuts=lambda count, name: {},
        limit=_check_limit(memory_limit),
        allowed=_check_pins(pins, model, placed),
        every=costs is None,
    )

    def with_remat(level: Remat) -> Problem:
        plan = replace(problem.plan, remat=level)
        of_plan = costs_of(plan, problem.costs)
        whole = replace(problem, plan=replace(plan, label=of_plan.label), costs=of_plan)
        return replace(whole, cuts=_Cuts(size, ordered, cutting, data, whole.checks_memory))

    return _least_remat(with_remat, _check_remat(remat))


def _least_remat(with_remat: Callable[[Remat], Problem], levels: Sequence[Remat]) -> Plan:
    """The plan of the first level of rematerialisation with which one fits."""
    too_large: list[Choice] = []
    for level in levels:
        problem = with_remat(level)
        if level == "head" and not problem.costs.lean_rows:
            if len(levels) > 1:
                continue  # nothing that "none" was not
            raise InputError("remat is 'head', but no row has a softmax head: pass 'none', 'layer' or 'stage'")
        plan = _by_hand(problem) or search(problem)
        if plan is not None:
            return replace(plan, choices=(*plan.choices, *too_large))
        too_large.append(Choice(f"remat {level}", math.inf, 0.0, 1, fits=False))
    raise _nothing_fits(with_remat(levels[-1]))


class _Cuts(NamedTuple):
    """The cuttings to try for a number of stages and a schedule."""

    batch_size: int
    lengths: tuple[int, ...]
    cutting: _Cutting
    data: int  # parts of a micro-batch's rows
    memory_matters: bool

    def __call__(self, stages: int, schedule: str) -> Cuts:
        """The cuttings of each bucket; none where the schedule makes no sense."""
        chunk, microbatches, whole = self.cutting
        cut = chunk is not None or (microbatches or 1) > 1
        if schedule == "serial":
            chunks, slices = (1,), () if cut else (1,)
        else:
            once = stages == 1 or whole is not None  # one stage has nobody to overlap with
            chunks = (1,) if once else tuple(range(1, MOST_CHUNKS + 1))
            slices = (1,) if stages == 1 and not self.memory_matters else MICROBATCHES
            slices = slices if microbatches is None else (microbatches,)
        return {length: self._options(length, chunks, slices) for length in self.lengths}

    def _options(self, length: int, chunks: Sequence[int], slices: Sequence[int]) -> tuple[BucketPlan, ...]:
        """Of equally fast ones those that divide the bucket are preferred, then few chunks and micro-batches."""
        fixed = self.cutting.chunk
        steps = [min(fixed, length)] if fixed is not None else [-(-length // n) for n in chunks if n <= length]
        options = {
            BucketPlan(
                length, step, -(-length // step), number, -(-self.batch_size // (number * self.data)) * self.data
            )
            for step in steps
            for number in slices
            if number <= self.batch_size
        }
        return tuple(sorted(options, key=lambda cut: (length % cut.chunk > 0, cut.chunks, cut.microbatches)))


def _by_hand(problem: Problem) -> Plan | None:
    """The plan, where everything is fixed and no memory is to be checked; else None."""
    if problem.partition is None or len(problem.schedules) > 1 or problem.checks_memory:
        return None
    stages, (schedule,) = len(problem.partition), problem.schedules
    cuts = problem.cuts(stages, schedule)
    if any(len(options) != 1 for options in cuts.values()) or not problem.allowed.all():
        return None
    ends = [sum(problem.partition[:stage]) for stage in range(stages + 1)]
    return problem.make(ends, schedule, {length: options[0] for length, options in cuts.items()})


def _nothing_fits(problem: Problem) -> InputError:
    lacking, device, needed = shortage(problem)
    helps = []
    if problem.partition is None and len(problem.plan.devices) < len(problem.plan.rows):
        helps.append("more stages (devices)")
    if problem.plan.remat in ("none", "head"):
        helps.append("remat='layer' or None")
    helps += ["a smaller batch_size", "more microbatches"]
    return InputError(
        f"no plan fits the memory: device {device} would hold {needed:,.0f} bytes at least, {lacking:,.0f} more than "
        f"it may: pass {', '.join(helps[:-1])} or {helps[-1]}"
    )


def _rows(model: PlannedModel, batch_size: int, length: int) -> tuple[Row, ...]:
    costs: list[Cost] = [layer.cost(batch_size, length) for layer in model.rows]
    work = sum(cost.flops for cost in costs)
    return tuple(
        Row(layer.name, layer.kind, cost.parameters, cost.flops / work if work else 0.0)
        for layer, cost in zip(model.rows, costs, strict=True)
    )


class _Cutting(NamedTuple):
    """What the user fixed of how batches are cut, checked; None: to be chosen."""

    chunk: int | None
    microbatches: int | None
    whole: str | None  # the row whose time cannot be cut


def _several(name: str, values: Any, example: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise InputError(f"{name} is {values!r}, wanted a sequence: pass e.g. {example}")
    return tuple(values)


def _check_lengths(lengths: Sequence[SupportsIndex]) -> tuple[int, ...]:
    given = _several("lengths", lengths, "lengths=(16, 32, 64)")
    if not given:
        raise InputError("lengths is empty, wanted the buckets' lengths: pass e.g. lengths=(16, 32, 64)")
    return tuple(sorted({positive(f"lengths[{i}]", length) for i, length in enumerate(given)}))


def _check_cutting(
    model: PlannedModel,
    batch_size: int,
    lengths: Sequence[int],
    chunk: SupportsIndex | None,
    microbatches: SupportsIndex | None,
) -> _Cutting:
    steps = None if chunk is None else positive("chunk", chunk)
    slices = None if microbatches is None else positive("microbatches", microbatches)
    whole = next((layer.name for layer in model.rows if not layer.chunkable), None)
    if steps is not None and steps > lengths[-1]:
        raise InputError(
            f"chunk is {steps} time steps, the longest bucket has {lengths[-1]}: pass at most chunk={lengths[-1]}"
        )
    if steps is not None and whole is not None:
        raise InputError(
            f"chunk is {steps}, but row {whole!r} cannot be cut in time: leave chunk out, use microbatches to overlap"
        )
    if slices is not None and slices > batch_size:
        raise InputError(
            f"microbatches is {slices}, the batch has {batch_size} rows: pass at most microbatches={batch_size}"
        )
    return _Cutting(steps, slices, whole)


def _check_stages(
    rows: int,
    devices: Sequence[Any],
    stages: SupportsIndex | None,
    partition: Sequence[SupportsIndex] | Literal["auto"] | None,
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The numbers of stages to try, and the partition if it is fixed."""
    if not devices:
        raise InputError("devices is empty, wanted one for each stage: pass e.g. devices=jax.devices()")
    count = None if stages is None else positive("stages", stages)
    if count is not None:
        check_stages(count, rows)
    sizes = None
    if partition is not None and not (isinstance(partition, str) and partition == "auto"):
        sizes = check_partition(partition, rows)
        if count not in (None, len(sizes)):
            raise InputError(f"stages is {count}, partition has {len(sizes)}: leave stages out, or pass {len(sizes)}")
        count = len(sizes)
    if count is None:
        most = min(len(devices), rows)
        tried = range(1, most + 1) if most <= MOST_COUNTS else (2**k for k in range(most.bit_length()))
        return tuple(dict.fromkeys([*tried, most])), None
    if count > len(devices):
        what, one = ("groups of devices", "group") if isinstance(devices[0], Group) else ("devices", "device")
        raise InputError(
            f"{count} stages for {len(devices)} {what}: pass one {one} for each stage, a {one} may be there twice"
        )
    return (count,), sizes


def _check_divided(kinds: Sequence[str], parts: int) -> None:
    if parts > 1 and not any(kind in DIVIDED for kind in kinds):
        raise InputError(
            f"model_parallel is {parts}, but no row has a vocabulary ({' or '.join(DIVIDED)}): leave it out, use "
            "data_parallel"
        )


def _check_schedule(schedule: str | Generator | None, cutting: _Cutting) -> dict[str, Generator]:
    """The schedules to try, by name."""
    if schedule is None:
        return dict(SCHEDULES)
    if callable(schedule):
        return {getattr(schedule, "__name__", "custom"): schedule}
    if schedule not in SCHEDULES:
        close = difflib.get_close_matches(schedule, SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"schedule {schedule!r} is unknown: {hint}pass one of {', '.join(map(repr, SCHEDULES))}")
    if schedule == "serial" and (cutting.chunk is not None or (cutting.microbatches or 1) > 1):
        option = "chunk" if cutting.chunk is not None else "microbatches"
        raise InputError(
            f"schedule 'serial' runs a batch uncut, {option} is {getattr(cutting, option)}: leave {option} out, "
            "or pass schedule='wavefront'"
        )
    return {schedule: SCHEDULES[schedule]}


def _check_remat(remat: Remat | None) -> tuple[Remat, ...]:
    """What to try, in order."""
    if remat is None:
        return get_args(Remat)
    if remat not in get_args(Remat):
        known = ", ".join(map(repr, get_args(Remat)))
        raise InputError(f"remat is {remat!r}, wanted one of {known}, or None: pass 'none' to recompute nothing")
    return (remat,)


def _check_limit(limit: float | None) -> int | None:
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise InputError(f"memory_limit is {limit!r}, wanted bytes above 0: pass e.g. 16e9, or None")
    return int(limit)


def _check_weights(weights: Mapping[int, float] | None, lengths: Sequence[int]) -> dict[int, float]:
    """The share of each bucket."""
    if weights is None:
        return dict.fromkeys(lengths, 1 / len(lengths))
    for length, weight in weights.items():
        if length not in lengths:
            known = ", ".join(map(str, lengths))
            raise InputError(f"weights has length {length}, the buckets are {known}: leave it out")
        if not 0 <= weight < math.inf:
            raise InputError(f"weights[{length}] is {weight}, wanted at least 0: pass e.g. how many batches")
    whole = sum(weights.values())
    if not whole:
        raise InputError("weights are all 0, wanted how often each bucket occurs: pass a number above 0 for one")
    return {length: weights.get(length, 0) / whole for length in lengths}


def _check_pins(pins: Mapping[str | int, Any] | None, model: PlannedModel, devices: Sequence[Any]) -> np.ndarray:
    """[R, devices] whether a row may be on a device."""
    names = [layer.name for layer in model.rows]
    allowed = np.full((len(names), len(devices)), True)
    for row, device in (pins or {}).items():
        if isinstance(row, str):
            if names.count(row) != 1:
                what = "no row" if row not in names else "more than one row"
                raise InputError(f"pins has {row!r}, {what} has this name: pass a row's index, 0 to {len(names) - 1}")
            index = names.index(row)
        else:
            index = operator.index(row)
            if not 0 <= index < len(names):
                raise InputError(f"pins has row {row}, the model has {len(names)}: pass 0 to {len(names) - 1}")
        if device not in devices:
            raise InputError(f"pins puts row {row!r} on {device}, which is not in devices: pass one that is")
        allowed[index] = [other == device for other in devices]
    return allowed
