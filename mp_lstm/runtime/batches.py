"""Batches on their devices: cut into units, each part where it is needed.

    inputs           stage 0, one array a unit
    targets, weights last stage, one array a unit
    lengths          every stage, one array a micro-batch
    resets           every stage, where state is carried

Cutting is done in numpy before anything is sent: slices in a program would make its shapes those of the bucket, and
programs could not be shared between buckets.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mp_lstm.errors import InputError
from mp_lstm.layers.batch import Batch
from mp_lstm.layers.checks import checked, step_shape
from mp_lstm.layers.model import Model
from mp_lstm.planning.plan import BucketPlan, Plan, row_splits
from mp_lstm.runtime.placement import Tree, over_rows, over_steps, put
from mp_lstm.runtime.stages import Stage


class Shape(NamedTuple):
    """What programs depend on: sizes of a unit, chunks joined, and the batch's structure."""

    chunk: int
    rows: int
    structure: Hashable


class PlacedBatch(NamedTuple):
    """One batch of a window, cut and placed.

    Args:
      bucket: how its bucket is cut.
      shape: what its programs depend on.
      splits: batch rows of each micro-batch.
      inputs, targets, weights: by micro-batch and chunk.
      lengths: by stage and micro-batch; None where every step is real.
      resets: by stage; None where no state is carried.
    """

    bucket: BucketPlan
    shape: Shape
    splits: tuple[tuple[int, int], ...]
    inputs: list[list[Tree]]
    targets: list[list[Tree]]
    weights: list[list[jax.Array]]
    lengths: list[list[jax.Array | None]]
    resets: list[jax.Array] | None


class PlacedWindow(NamedTuple):
    """The batches of one update on their devices, and what their sums are divided by.

    Args:
      batches: in order.
      weight: sum of the loss's weights; tokens: number of real steps that count.
      weight_scalar: `weight` on the last stage; denominators: the gradient's, by stage.
    """

    batches: tuple[PlacedBatch, ...]
    weight: float
    tokens: int
    weight_scalar: jax.Array
    denominators: tuple[jax.Array, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bucket length of each batch."""
        return tuple(batch.bucket.length for batch in self.batches)


def place_window(
    model: Model, plan: Plan, stages: Sequence[Stage], batches: Sequence[Batch], *, normalize: str, dtype: Any
) -> PlacedWindow:
    """Checks, cuts and sends the batches of one window."""
    padded = [pad_batch(plan, checked(model.rows, jax.device_get(batch)), dtype) for batch in batches]
    weights = [np.asarray(batch.weights) for _, batch in padded]
    weight = float(sum(part.sum(dtype=np.float64) for part in weights))
    rows = sum(int((part != 0).any(axis=0).sum()) for part in weights)
    denominator = np.asarray((weight if normalize == "tokens" else rows) or 1.0, dtype)
    return PlacedWindow(
        batches=tuple(_place(plan, stages, bucket, batch) for bucket, batch in padded),
        weight=weight,
        tokens=sum(int((part != 0).sum()) for part in weights),
        weight_scalar=put(np.asarray(weight or 1.0, dtype), stages[-1].sharding),
        denominators=tuple(put(denominator, stage.sharding) for stage in stages),
    )


def pad_batch(plan: Plan, batch: Batch, dtype: Any) -> tuple[BucketPlan, Batch]:
    """A batch's bucket, and the batch padded to it and to the plan's rows, its weights given and zero on padding."""
    time, rows = step_shape(batch)
    if rows > plan.batch_size:
        raise InputError(
            f"the batch has {rows} rows, the plan is for {plan.batch_size}: pass batch_size={rows} to make_plan, or "
            "arrays with time first, [T, B, ...]"
        )
    bucket = plan.bucket_for(time)
    add_time, add_rows = bucket.chunk * bucket.chunks - time, plan.batch_size - rows
    uneven = bucket.rows_per_microbatch * bucket.microbatches != plan.batch_size
    lengths = batch.lengths
    if lengths is None and (add_time or add_rows or uneven):
        lengths = np.full(rows, time, np.int32)
    weights = np.ones((time, rows), dtype) if batch.weights is None else batch.weights.astype(dtype)
    if lengths is not None:
        real = np.arange(time)[:, None] < lengths[None, :]
        weights = np.where(real, weights, 0).astype(dtype)
        lengths = np.pad(lengths, (0, add_rows)).astype(np.int32)
        # Whatever stands on padding (NaN is zero times NaN) must not reach a product.
        batch = batch._replace(inputs=_zeroed(batch.inputs, real))
    if lengths is not None or batch.weights is not None:
        batch = batch._replace(targets=_zeroed(batch.targets, weights != 0))

    def pad(leaf: np.ndarray) -> np.ndarray:
        return np.pad(leaf, [(0, add_time), (0, add_rows)] + [(0, 0)] * (leaf.ndim - 2))

    resets = None if batch.resets is None else np.pad(batch.resets.astype(bool), (0, add_rows), constant_values=True)
    if add_time or add_rows:
        batch = batch._replace(inputs=jax.tree.map(pad, batch.inputs), targets=jax.tree.map(pad, batch.targets))
        weights = pad(weights)
    return bucket, batch._replace(weights=weights, lengths=lengths, resets=resets)


def _zeroed(tree: Tree, kept: np.ndarray) -> Tree:
    """Arrays [T, B, ...] with zeros where a step is not kept."""

    def zeroed(leaf: np.ndarray) -> np.ndarray:
        return np.where(kept.reshape(kept.shape + (1,) * (leaf.ndim - 2)), leaf, np.zeros((), leaf.dtype))

    return jax.tree.map(zeroed, tree)


def _place(plan: Plan, stages: Sequence[Stage], bucket: BucketPlan, batch: Batch) -> PlacedBatch:
    """Cuts one padded batch into units and sends each part to the stages that need it."""
    splits = row_splits(plan.batch_size, bucket.microbatches)
    size = bucket.rows_per_microbatch

    def cut(tree: Tree, stage: Stage) -> list[list[Tree]]:
        def unit(first: int, last: int, chunk: int) -> Tree:
            def part(leaf: np.ndarray) -> np.ndarray:
                piece = leaf[chunk * bucket.chunk : (chunk + 1) * bucket.chunk, first:last]
                if last - first < size:
                    piece = np.pad(piece, [(0, 0), (0, size - (last - first))] + [(0, 0)] * (leaf.ndim - 2))
                return np.array(piece)  # a copy: the device may alias it for as long as it likes

            return put(jax.tree.map(part, tree), over_steps(stage.sharding))

        return [[unit(*split, chunk) for chunk in range(bucket.chunks)] for split in splits]

    def lengths(stage: Stage) -> list[jax.Array | None]:
        if batch.lengths is None:
            return [None] * len(splits)
        pieces = [np.pad(batch.lengths[first:last], (0, size - (last - first))) for first, last in splits]
        return [put(piece, over_rows(stage.sharding)) for piece in pieces]

    structure = (
        jax.tree.structure(batch._replace(resets=None)),
        tuple((leaf.shape[2:], str(leaf.dtype)) for leaf in jax.tree.leaves((batch.inputs, batch.targets))),
    )
    return PlacedBatch(
        bucket=bucket,
        shape=Shape(bucket.chunk, size, structure),
        splits=splits,
        inputs=cut(batch.inputs, stages[0]),
        targets=cut(batch.targets, stages[-1]),
        weights=cut(batch.weights, stages[-1]),
        lengths=[lengths(stage) for stage in stages],
        resets=None if batch.resets is None else [put(batch.resets, stage.sharding) for stage in stages],
    )
