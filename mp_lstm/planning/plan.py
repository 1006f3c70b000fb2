"""The plan of a training run: which rows form which stage, on which device, and how each bucket's batch is cut.

A `Plan` is data and knows no model: it can be printed, compared and asked for the schedule of a window of batches. How
one is chosen is in `make.py` and `search.py`, what its step takes in `prediction.py`.

Devices are opaque values here: plans for devices that are not there can be made and predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from mp_lstm.errors import InputError
from mp_lstm.planning.explain import Choice, alternatives_table, bucket_table, placement_table
from mp_lstm.planning.group import Group, shape
from mp_lstm.planning.schedule import Schedule, validate
from mp_lstm.planning.schedules import SCHEDULES, Generator

Remat = Literal["none", "head", "layer", "stage"]  # the further down, the less is kept and the more computed again
COMPUTED_AGAIN = {
    "head": "W computes the head's logits again, block by block",
    "layer": "B recomputes F, by layer",
    "stage": "B recomputes F, by stage",
}


@runtime_checkable
class PlannedLayer(Protocol):
    """What planning needs to know of a layer: `mp_lstm.layers.base.Layer` has it.

    A field `lean`, where a layer has one and it is not None, is the layer that rematerialisation runs in its place.
    """

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
      devices: device of each stage, or `Group` of devices; stages may share one.
      batch_size: rows of a batch.
      buckets: by length, in increasing order.
      schedule_name: of the schedule.
      remat: what is computed again instead of kept: nothing; rows in their lean variants do, the head's logits; each
        other row's F too, from its input; or the whole stage's.
      generator: makes the schedules; None: `SCHEDULES[schedule_name]`.
      label: where the numbers come from that the search compared.
      choices: what the search compared, the chosen plan first; empty for a plan made by hand.
    """

    rows: tuple[Row, ...]
    partition: tuple[int, ...]
    devices: tuple[Any, ...]
    batch_size: int
    buckets: dict[int, BucketPlan] = field(hash=False)
    schedule_name: str
    remat: Remat = "none"
    generator: Generator | None = None
    label: str = field(default="", repr=False, compare=False)
    choices: tuple[Choice, ...] = field(default=(), repr=False, compare=False)
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
        if not isinstance(lengths, Iterable):
            raise InputError(
                f"lengths is {lengths!r}, the bucket length of each batch is wanted: pass e.g. ({lengths},)"
            )
        if not lengths:
            raise InputError("a window got no batches: pass the bucket length of at least one, e.g. (32,)")
        for length in lengths:
            if length not in self.buckets:
                known = ", ".join(map(str, self.buckets))
                raise InputError(f"no bucket has length {length}, this plan has {known}: pad the batch to one of them")
        cuts = [self.buckets[length] for length in lengths]
        chunks = tuple(bucket.chunks for bucket in cuts for _ in range(bucket.microbatches))
        if chunks not in self._schedules:
            schedule = (self.generator or SCHEDULES[self.schedule_name])(self.device_indices, chunks)
            validate(schedule)
            self._schedules[chunks] = schedule
        return self._schedules[chunks]

    def remember(self, schedule: Schedule) -> None:
        """Keeps a valid schedule of the plan that was built already."""
        self._schedules[schedule.chunks] = schedule

    def explain(self) -> str:
        """Draws the alternatives that this plan beat: what a step of theirs would take, and why."""
        table = alternatives_table(self.choices)
        return f"{self.label}:\n{table}" if self.choices else table

    def __str__(self) -> str:
        recomputed = "" if self.remat == "none" else f"\n\nremat: {COMPUTED_AGAIN[self.remat]}"
        return f"{placement_table(self)}\n\n{bucket_table(self)}{self._mesh()}{recomputed}"

    def _mesh(self) -> str:
        """How the devices of a stage share its work, where there are several."""
        if not isinstance(self.devices[0], Group):
            return ""
        data, model = shape(self.devices[0])
        return f"\n\nmesh of each stage: data {data} (parts of the rows), model {model} (parts of the vocabulary)"


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
