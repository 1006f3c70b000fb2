"""What a batch must be for a model, checked before anything is computed from it.

Shapes and types are known of every array, of traced ones too. Values are looked at in arrays of the host alone, so no
check waits for a device; and only where they are read: what stands on padding, or as the target of a step without
weight, may be anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Layer
from mp_lstm.layers.batch import Batch

MOST_WEIGHT = 2.0**60
"""Largest sum of a batch's weights. Gradients are sums over steps, and float32 must hold the square of their norm."""

REMEDIES = {
    "inputs": "make the model with a larger vocab, or state the lengths if such steps are padding",
    "targets": "make the model with a larger vocab, or give such steps weight 0",
}


def checked(rows: Sequence[Layer], batch: Any, *, targets: bool = True) -> Batch:
    """The batch, its lists of numbers as arrays, if a model of these rows can be given it.

    Args:
      rows: of the model.
      batch: as it was given.
      targets: whether they are read.

    Raises:
      InputError: it is no batch; shapes or types do not agree; lengths, weights or ids are out of range.

    Example:
      >>> import mp_lstm, numpy as np
      >>> rows = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=1).rows
      >>> checked(rows, mp_lstm.Batch(np.zeros((3, 2), int), np.ones((3, 2), int), lengths=[3, 1])).lengths
      array([3, 1])
    """
    if not isinstance(batch, Batch):
        raise InputError(f"got a {type(batch).__name__} for a batch: pass mp_lstm.Batch(inputs, targets)")
    batch = _with_arrays(batch)
    time, size = step_shape(batch)
    for field in ("inputs", "targets"):
        for leaf in jax.tree.leaves(getattr(batch, field)):
            if leaf.shape[:2] != (time, size):
                raise InputError(f"batch.{field} has shape {leaf.shape}, its first axes must be T={time}, B={size}")
    for field, shape, wanted in (
        ("weights", (time, size), f"one value for each of the {time} steps of {size} rows"),
        ("lengths", (size,), f"one value for each of the {size} rows"),
        ("resets", (size,), f"one value for each of the {size} rows"),
    ):
        value = getattr(batch, field)
        if value is not None and value.shape != shape:
            raise InputError(f"batch.{field} has shape {value.shape}, {wanted} is wanted")
    real = _real_steps(batch.lengths, time, size)
    counted = _counted_steps(batch.weights, real)
    if rows[0].input_ids is not None:
        check_ids("inputs", batch.inputs, rows[0].input_ids, rows[0].name, real)
    if targets and rows[-1].target_ids is not None:
        check_ids("targets", batch.targets, rows[-1].target_ids, rows[-1].name, counted)
    return batch


def step_shape(batch: Batch) -> tuple[int, int]:
    """(T, B) of a batch."""
    leaves = jax.tree.leaves(batch.inputs)
    if not leaves or np.ndim(leaves[0]) < 2:
        got = f"shape {np.shape(leaves[0])}" if leaves else "no array"
        raise InputError(f"batch.inputs has {got}, [T, B, ...] is wanted: pass arrays, time first, and no lists")
    return leaves[0].shape[0], leaves[0].shape[1]


def check_ids(field: str, value: Any, count: int, name: str, read: np.ndarray | None) -> None:
    """Raises InputError for ids [T, B] of another shape or type, or beyond what a layer knows.

    Args:
      field: of the batch.
      value: the ids.
      count: ids that the layer knows, from 0.
      name: of the layer.
      read: steps [T, B] whose ids are read; None: it is not known on the host which.
    """
    is_array = isinstance(value, jax.Array | np.ndarray)
    if not is_array or value.ndim != 2 or not jnp.issubdtype(value.dtype, jnp.integer):
        raise InputError(f"batch.{field} is {described(value)}, whole numbers [T, B] are wanted: {name} takes ids")
    if read is None or isinstance(value, jax.Array):
        return
    wrong = np.argwhere(((value < 0) | (value >= count)) & read)
    if len(wrong):
        step, row = wrong[0]
        raise InputError(
            f"batch.{field} has id {value[step, row]} at step {step} of row {row}, {name} knows 0 to {count - 1}: "
            f"{REMEDIES[field]}"
        )


def check_features(name: str, x: Any, size: int) -> None:
    """Raises InputError for an input of a layer that is not [T, B, size]."""
    if not isinstance(x, jax.Array | np.ndarray) or x.ndim != 3 or x.shape[-1] != size:
        raise InputError(
            f"{name}: its input is {described(x)}, [T, B, {size}] is wanted: make the layer with inputs of that size"
        )


def described(value: Any) -> str:
    """Type and shape of an array, for messages; the type alone of anything else.

    Example:
      >>> described(np.zeros((3, 2))), described(None)
      ('float64 [3, 2]', 'None')
    """
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _with_arrays(batch: Batch) -> Batch:
    """The batch with numpy arrays for all that are not JAX's."""

    def array(field: str, value: Any) -> Any:
        if isinstance(value, jax.Array):
            return value
        try:
            value = np.asarray(value)
        except ValueError as error:  # a list of lists that differ in length
            raise InputError(f"batch.{field} is no array ({error}): pass a numpy array") from error
        if value.dtype.kind in "OSUMm":
            raise InputError(f"batch.{field} has values of type {value.dtype}, numbers are wanted")
        return value

    trees = {field: getattr(batch, field) for field in ("inputs", "targets")}
    arrays = {field: jax.tree.map(lambda leaf, field=field: array(field, leaf), tree) for field, tree in trees.items()}
    for field in ("weights", "lengths", "resets"):
        value = getattr(batch, field)
        arrays[field] = None if value is None else array(field, value)
    return Batch(**arrays)


def _real_steps(lengths: Any, time: int, rows: int) -> np.ndarray | None:
    """[T, B] steps that are not padding, None where the host does not know; raises InputError for wrong lengths."""
    if lengths is None:
        return np.ones((time, rows), bool)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise InputError(f"batch.lengths has values of type {lengths.dtype}, whole numbers of steps are wanted")
    if isinstance(lengths, jax.Array):
        return None
    if rows and not (lengths.min() >= 0 and lengths.max() <= time):
        raise InputError(
            f"batch.lengths lie in {lengths.min()}..{lengths.max()}, 0..{time} (T of the inputs) is wanted"
        )
    return np.arange(time)[:, None] < lengths[None, :]


def _counted_steps(weights: Any, real: np.ndarray | None) -> np.ndarray | None:
    """[T, B] real steps with a weight, None where the host does not know; raises InputError for wrong weights."""
    if weights is None or real is None or isinstance(weights, jax.Array):
        return real if weights is None else None
    wrong = np.argwhere(~(np.isfinite(weights) & (weights >= 0)) & real)
    if len(wrong):
        step, row = wrong[0]
        raise InputError(
            f"batch.weights has {weights[step, row]} at step {step} of row {row}, finite numbers of at least 0 are "
            "wanted: give steps that must not count weight 0"
        )
    with np.errstate(over="ignore"):
        total = np.sum(weights, dtype=np.float64, where=real)
    if total > MOST_WEIGHT:
        raise InputError(
            f"batch.weights sum to {total:.2g}, at most {MOST_WEIGHT:.2g} is wanted, for which float32 holds the "
            "gradient: divide all weights by one number, which leaves the mean loss as it is"
        )
    return real & (weights != 0)
