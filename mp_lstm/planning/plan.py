"""The plan of a training run: which rows form which stage, on which device, and how each bucket's batch is cut.

A `Plan` is data and knows no model: it can be printed, compared and asked for the schedule of a window of batches.
`make_plan` checks what the user fixed and chooses the rest: the partition by floating-point operations, the chunks of
each bucket by simulating a step at nominal rates. A chunk more fills the pipeline sooner and reads every weight once
more, so the simulation has to weigh the two for each length.

Devices are opaque values here: plans for devices that are not there can be made and predicted.

The checks of `make_plan`'s arguments make this file longer than most; they stand beside what they guard.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex, runtime_checkable

from mp_lstm.errors import InputError
from mp_lstm.planning.costs import Cost, Rates, TaskTimes, task_times, total
from mp_lstm.planning.partition import balanced, check_partition, check_stages
from mp_lstm.planning.schedule import SCHEDULES, Schedule, Task, validate
from mp_lstm.planning.simulate import Timeline, simulate

MOST_CHUNKS = 8  # tried for a bucket; beyond it the weights read again outweigh what the pipeline gains


@runtime_checkable
class PlannedLayer(Protocol):
    """What planning needs to know of a layer: `mp_lstm.layers.base.Layer` has it."""

    @property
    def name(self) -> str:
        """For tables and messages."""
        ...

    @property
    def kind(self) -> str:
        """For the placement table."""
        ...

    @property
    def chunkable(self) -> bool:
        """Whether time can be cut."""
        ...

    @property
    def cost(self) -> Any:
        """(batch size, time steps) -> Cost. A function that is a field: type checkers take it for a method."""
        ...


@runtime_checkable
class PlannedModel(Protocol):
    """A model as planning sees it: one layer for each placement row."""

    @property
    def rows(self) -> Sequence[PlannedLayer]:
        """The layers, in order."""
        ...


class Row(NamedTuple):
    """A line of the placement table; `share` is the row's part of the floating-point operations."""

    name: str
    kind: str
    parameters: int
    share: float


class BucketPlan(NamedTuple):
    """How a batch of one bucket is cut.

    Args:
      length: the bucket's length in time steps.
      chunk: time steps of a chunk.
      chunks: number of chunks; chunk * chunks is the padded length that runs.
      microbatches: number of micro-batches.
      rows_per_microbatch: batch rows of a micro-batch, the smaller ones being padded to it.
    """

    length: int
    chunk: int
    chunks: int
    microbatches: int
    rows_per_microbatch: int


@dataclass(frozen=True)
class Plan:
    """Partition, placement and cutting of a model's training step; `print(plan)` is the placement table.

    Args:
      rows: the model's placement rows.
      partition: number of rows of each stage.
      devices: device of each stage; stages may share one.
      batch_size: rows of a batch.
      buckets: by length, in increasing order.
      schedule_name: key of `SCHEDULES`.
    """

    rows: tuple[Row, ...]
    partition: tuple[int, ...]
    devices: tuple[Any, ...]
    batch_size: int
    buckets: dict[int, BucketPlan] = field(hash=False)
    schedule_name: str
    _schedules: dict[tuple[int, ...], Schedule] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def stages(self) -> tuple[range, ...]:
        """The row indices of each stage."""
        ends = [sum(self.partition[:stage]) for stage in range(len(self.partition) + 1)]
        return tuple(range(first, last) for first, last in pairwise(ends))

    @property
    def device_indices(self) -> tuple[int, ...]:
        """For each stage the number of its device, counted from 0 in the order in which stages first use them."""
        distinct: list[Any] = []
        for device in self.devices:
            if device not in distinct:
                distinct.append(device)
        return tuple(distinct.index(device) for device in self.devices)

    def bucket_for(self, length: int) -> BucketPlan:
        """Finds the smallest bucket that holds `length` time steps.

        Raises:
          InputError: no bucket does.

        Example:
          >>> buckets = {length: BucketPlan(length, length, 1, 1, 20) for length in (16, 32)}
          >>> Plan((Row("lstm", "lstm", 10, 1.0),), (1,), ("cpu:0",), 20, buckets, "serial").bucket_for(17).length
          32
        """
        for bucket in self.buckets.values():
            if length <= bucket.length:
                return bucket
        raise InputError(
            f"length {length} fits no bucket, the longest is {max(self.buckets)}: cut the text, or plan with {length} "
            "in lengths"
        )

    def schedule(self, lengths: Sequence[int]) -> Schedule:
        """Builds the schedule of a window: one update over batches of these bucket lengths, one after another.

        Args:
          lengths: bucket length of each batch of the window.

        Returns:
          The schedule, validated; micro-batches are numbered through the window. Built once for each cutting.

        Raises:
          InputError: there is no batch, or no bucket of a length.

        Example:
          A plan whose bucket 8 has two micro-batches of two chunks, and bucket 4 two of one:

          >>> buckets = {4: BucketPlan(4, 4, 1, 2, 3), 8: BucketPlan(8, 4, 2, 2, 3)}
          >>> rows = (Row("embed", "embedding", 10, 0.5), Row("head", "head", 10, 0.5))
          >>> plan = Plan(rows, (1, 1), ("cpu:0", "cpu:1"), 5, buckets, "wavefront")
          >>> plan.schedule((8, 4)).chunks
          (2, 2, 1, 1)
        """
        if not lengths:
            raise InputError("a window got no batches: pass the bucket length of at least one, e.g. (32,)")
        for length in lengths:
            if length not in self.buckets:
                known = ", ".join(map(str, self.buckets))
                raise InputError(f"no bucket has length {length}, this plan has {known}: pad the batch to one of them")
        cuts = [self.buckets[length] for length in lengths]
        chunks = tuple(bucket.chunks for bucket in cuts for _ in range(bucket.microbatches))
        if chunks not in self._schedules:
            schedule = SCHEDULES[self.schedule_name](self.device_indices, chunks)
            validate(schedule)
            self._schedules[chunks] = schedule
        return self._schedules[chunks]

    def __str__(self) -> str:
        return f"{placement_table(self)}\n\n{bucket_table(self)}"


def make_plan(
    model: PlannedModel,
    *,
    batch_size: SupportsIndex,
    lengths: Sequence[SupportsIndex],
    devices: Sequence[Any],
    stages: SupportsIndex | None = None,
    partition: Sequence[SupportsIndex] | Literal["auto"] | None = None,
    schedule: str | None = None,
    chunk: SupportsIndex | None = None,
    microbatches: SupportsIndex | None = None,
) -> Plan:
    """Plans how a model trains over devices. What is None is chosen.

    Args:
      model: has `rows`, the layers that can be placed.
      batch_size: rows of a batch.
      lengths: the buckets' lengths in time steps, in any order.
      devices: one for each stage, in order; a device given twice holds two stages. Those beyond `stages` stay unused.
      stages: number of stages; None: those of `partition`, else one for each device, at most one for each row.
      partition: rows of each stage; None or "auto": balanced by floating-point operations at the longest length.
      schedule: a name of `SCHEDULES`; None: "wavefront", or "serial" for one stage that need not be cut.
      chunk: time steps of a chunk, in buckets that are longer; None: for each bucket the number of chunks, up to 8,
        with the least predicted step time.
      microbatches: slices of a batch's rows; None: 1.

    Returns:
      The plan.

    Raises:
      InputError: an argument is out of range, or two of them do not agree.

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
           8      2       4              1         20  wavefront
          32      4       8              1         20  wavefront
    """
    size = _positive("batch_size", batch_size)
    ordered = _check_lengths(lengths)
    costs = [layer.cost(size, ordered[-1]) for layer in model.rows]
    sizes, placed = _place(costs, devices, stages, partition)
    cutting = _check_cutting(model, size, ordered, chunk, microbatches)
    name = _choose_schedule(schedule, len(sizes), cutting)
    work = sum(cost.flops for cost in costs)
    rows = tuple(
        Row(layer.name, layer.kind, cost.parameters, cost.flops / work if work else 0.0)
        for layer, cost in zip(model.rows, costs, strict=True)
    )
    plan = Plan(rows, sizes, placed, size, {}, name)
    return replace(plan, buckets={length: _plan_bucket(plan, model, length, cutting) for length in ordered})


def predict(plan: Plan, model: PlannedModel, rates: Rates, length: int) -> Timeline:
    """Predicts a step on one batch, every device being of the given rates and working for itself alone.

    Args:
      plan: a plan of the model.
      model: the model.
      rates: of each device and of the links between them.
      length: the batch's bucket length.

    Returns:
      The simulated timeline, in seconds.

    Raises:
      InputError: the plan has no bucket of this length.

    Example:
      Two devices of 1 teraflop/s:

      >>> from collections import namedtuple
      >>> Layer = namedtuple("Layer", "name kind chunkable cost")
      >>> cost = lambda batch_size, time: Cost(*[1e7 * batch_size * time] * 3, 1_000_000, 4_000_000, 0, 6400 * time)
      >>> model = namedtuple("Model", "rows")([Layer(f"lstm {i}", "lstm", True, cost) for i in (1, 2)])
      >>> plan = make_plan(model, batch_size=20, lengths=(32,), devices=("cpu:0", "cpu:1"), chunk=8)
      >>> print(f"{predict(plan, model, Rates(flops_per_second=1e12), 32).makespan * 1e3:.1f} ms")
      30.5 ms
    """
    schedule = plan.schedule((length,))
    bucket = plan.buckets[length]
    units = _stage_costs(plan, model, bucket.rows_per_microbatch, bucket.chunk)
    wholes = _stage_costs(plan, model, bucket.rows_per_microbatch, bucket.chunk * bucket.chunks)
    times = [task_times(unit, whole, rates) for unit, whole in zip(units, wholes, strict=True)]

    def transfer(task: Task, from_stage: int, to_stage: int) -> float:
        # F sends its output up, B the gradient of that output down, W a scalar.
        sent = 0 if task.kind == "W" else units[min(from_stage, to_stage)].transfer_bytes
        return sent / rates.transfer_bytes_per_second + rates.latency_seconds

    return simulate(schedule, lambda task: _seconds(times, task), transfer=transfer)


def row_splits(batch_size: int, microbatches: int) -> tuple[tuple[int, int], ...]:
    """Splits a batch's rows into micro-batches that differ by one row at most, the larger ones first.

    Returns:
      For each micro-batch its first row and the row after its last.

    Example:
      >>> row_splits(5, 2)
      ((0, 3), (3, 5))
    """
    each, more = divmod(batch_size, microbatches)
    firsts = [each * i + min(i, more) for i in range(microbatches + 1)]
    return tuple(pairwise(firsts))


def placement_table(plan: Plan) -> str:
    """Draws every row with its stage, device, kind, parameters and share of the work."""
    lines = [("stage", "device", "row", "kind", "parameters", "share")]
    for stage, indices in enumerate(plan.stages):
        for row in (plan.rows[index] for index in indices):
            lines.append(
                (str(stage), str(plan.devices[stage]), row.name, row.kind, f"{row.parameters:,}", f"{row.share:.1%}")
            )
    parameters, share = sum(row.parameters for row in plan.rows), sum(row.share for row in plan.rows)
    lines.append(("", "", "total", "", f"{parameters:,}", f"{share:.1%}"))
    return _table(lines, "><<<>>")


def bucket_table(plan: Plan) -> str:
    """Draws how a batch of each bucket is cut."""
    lines = [("bucket", "chunk", "chunks", "micro-batches", "rows each", "schedule")]
    lines += [(*map(str, bucket), plan.schedule_name) for bucket in plan.buckets.values()]
    return _table(lines, ">>>>><")


def _table(lines: Sequence[tuple[str, ...]], align: str) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, align, widths, strict=True)).rstrip()
        for line in lines
    )


def _stage_costs(plan: Plan, model: PlannedModel, batch_size: int, time: int) -> list[Cost]:
    return [total(model.rows[index].cost(batch_size, time) for index in indices) for indices in plan.stages]


def _seconds(times: Sequence[TaskTimes], task: Task) -> float:
    return getattr(times[task.stage], task.kind)


class _Cutting(NamedTuple):
    """What the user fixed of how batches are cut, checked; None: to be chosen."""

    chunk: int | None
    microbatches: int | None
    whole: str | None  # the row whose time cannot be cut


def _positive(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}, wanted an integer: pass a whole number of at least 1") from None
    if number < 1:
        raise InputError(f"{name} is {number}, wanted at least 1: pass a positive number")
    return number


def _check_lengths(lengths: Sequence[SupportsIndex]) -> tuple[int, ...]:
    if not len(lengths):
        raise InputError("lengths is empty, wanted the buckets' lengths: pass e.g. lengths=(16, 32, 64)")
    return tuple(sorted({_positive(f"lengths[{i}]", length) for i, length in enumerate(lengths)}))


def _place(
    costs: Sequence[Cost],
    devices: Sequence[Any],
    stages: SupportsIndex | None,
    partition: Sequence[SupportsIndex] | Literal["auto"] | None,
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The rows of each stage, and its device."""
    placed = tuple(devices)
    if not placed:
        raise InputError("devices is empty, wanted one for each stage: pass e.g. devices=jax.devices()")
    count = min(len(placed), len(costs)) if stages is None else _positive("stages", stages)
    check_stages(count, len(costs))
    if partition is None or (isinstance(partition, str) and partition == "auto"):
        sizes = None
    else:
        sizes = check_partition(partition, len(costs))
        if stages is not None and count != len(sizes):
            raise InputError(f"stages is {count}, partition has {len(sizes)}: leave stages out, or pass {len(sizes)}")
        count = len(sizes)
    if count > len(placed):
        raise InputError(
            f"{count} stages for {len(placed)} devices: pass one device for each stage, a device may be there twice"
        )
    if sizes is None:
        sizes = balanced([cost.flops for cost in costs], count)
    return sizes, placed[:count]


def _check_cutting(
    model: PlannedModel,
    batch_size: int,
    lengths: Sequence[int],
    chunk: SupportsIndex | None,
    microbatches: SupportsIndex | None,
) -> _Cutting:
    steps = None if chunk is None else _positive("chunk", chunk)
    slices = None if microbatches is None else _positive("microbatches", microbatches)
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


def _choose_schedule(name: str | None, stages: int, cutting: _Cutting) -> str:
    cut = cutting.chunk is not None or (cutting.microbatches or 1) > 1
    if name is None:
        return "serial" if stages == 1 and not cut else "wavefront"
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"schedule {name!r} is unknown: {hint}pass one of {', '.join(map(repr, SCHEDULES))}")
    if name == "serial" and cut:
        option = "chunk" if cutting.chunk is not None else "microbatches"
        raise InputError(
            f"schedule 'serial' runs a batch uncut, {option} is {getattr(cutting, option)}: leave {option} out, "
            "or pass schedule='wavefront'"
        )
    return name


def _plan_bucket(plan: Plan, model: PlannedModel, length: int, cutting: _Cutting) -> BucketPlan:
    """The bucket cut as the user said, else for the least predicted step time (of equal ones the fewest chunks)."""
    slices = cutting.microbatches or 1
    rows = -(-plan.batch_size // slices)
    if cutting.chunk is not None:
        options = [min(cutting.chunk, length)]
    elif plan.schedule_name == "serial" or cutting.whole is not None:
        options = [length]
    else:
        options = [-(-length // chunks) for chunks in range(1, min(MOST_CHUNKS, length) + 1)]
    buckets = [BucketPlan(length, chunk, -(-length // chunk), slices, rows) for chunk in dict.fromkeys(options)]
    if len(buckets) == 1:
        return buckets[0]

    def seconds(bucket: BucketPlan) -> float:
        return predict(replace(plan, buckets={length: bucket}), model, Rates(), length).makespan

    return min(buckets, key=seconds)
