"""Any leaf-wise optax transformation, one state a row.

States are kept per row, so that they move with the row to any partition. A transformation that mixes leaves (a norm
over the whole tree) would silently compute something else on every stage: `check_leafwise` finds out by trying.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Params

OptimizerState = Any

SCALES = (1e-4, 10.0, 1e4, 1e8)
"""Sizes of gradients that the probe tries: clipping shows only beyond its threshold."""


def check_leafwise(optimizer: optax.GradientTransformation) -> None:
    """Raises InputError for a transformation that treats two leaves together otherwise than apart.

    Example:
      >>> import optax
      >>> check_leafwise(optax.adam(1e-3))
    """
    if not all(callable(getattr(optimizer, part, None)) for part in ("init", "update")):
        raise InputError(
            f"the optimizer is {optimizer!r}, an optax transformation is wanted: pass e.g. optax.adam(1e-3)"
        )
    for scale in SCALES:
        together = _probe(optimizer, ("a", "b"), scale)
        for leaf in ("a", "b"):
            apart = _probe(optimizer, (leaf,), scale)
            if not _alike(together[leaf], apart[leaf]):
                raise InputError(
                    "the optimizer mixes the leaves of its tree (as optax.clip_by_global_norm does), so it would act "
                    "on each stage alone: leave that part out, and for clipping by the global norm pass max_norm=... "
                    "to make_pipeline"
                )


def _alike(some: np.ndarray, others: np.ndarray) -> bool:
    """Whether updates of a leaf are the same but for rounding, which is all there is of elements that cancel out."""
    finite = np.abs(others[np.isfinite(others)])
    return np.allclose(some, others, rtol=1e-5, atol=1e-6 * finite.max(initial=0.0), equal_nan=True)


def _probe(optimizer: optax.GradientTransformation, leaves: tuple[str, ...], scale: float) -> dict[str, np.ndarray]:
    """Three updates of a small tree, one after another."""
    shapes = {"a": (2, 3), "b": (4, 2)}
    params: Any = {leaf: jnp.asarray(_numbers(shapes[leaf], leaf, 0)) for leaf in leaves}
    found = []
    try:
        state = optimizer.init(params)
        for step in range(1, 4):
            gradients = {leaf: jnp.asarray(_numbers(shapes[leaf], leaf, step) * np.float32(scale)) for leaf in leaves}
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            found.append(updates)
    except (TypeError, ValueError, AttributeError) as error:
        if "missing" in str(error):
            raise InputError(f"the optimizer needs more than gradients, state and parameters: {error}") from error
        reason, *_ = str(error).split("\n")
        raise InputError(
            f"the optimizer cannot update a tree of two small leaves ({reason}): pass one that takes any tree, what it "
            "needs to know of the tree (a mask, labels) as a function of it"
        ) from error
    return {leaf: np.array([updates[leaf] for updates in found]) for leaf in leaves}


def _numbers(shape: tuple[int, ...], leaf: str, step: int) -> np.ndarray:
    return np.random.default_rng([ord(leaf), step]).normal(size=shape).astype(np.float32)


def init(optimizer: optax.GradientTransformation, params: Params) -> OptimizerState:
    """One optimiser state for each row of a stage."""
    return tuple(optimizer.init(row) for row in params)


def square_norm(gradients: Params, *, flat: bool = True) -> Float[Array, ""]:
    """Sum of squares of a stage's gradients; what is shared counts once, with its owner.

    Args:
      gradients: of the stage's rows; on several devices each value counts once, wherever it lies.
      flat: take leaves as vectors, whose product one device has soonest. Leaves in parts would be gathered for it.
    """
    leaves = jax.tree.leaves(gradients)
    squares = (jnp.vdot(leaf, leaf) if flat else jnp.square(leaf).sum() for leaf in leaves)
    return sum(squares, jnp.zeros((), _dtype(leaves)))


def _dtype(leaves: list[Array]) -> Any:
    return jnp.result_type(*leaves) if leaves else jnp.float32


def normalized(gradients: Params, denominator: Array) -> list[Params]:
    """Gradient sums of a stage divided by what the window is normalised by."""
    return [jax.tree.map(lambda leaf: leaf / denominator.astype(leaf.dtype), row) for row in gradients]


def norm_and_loss(
    squares: tuple[Array, ...], denominator: Array, total: Array, weight: Array
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Global norm of the normalised gradient, and mean loss; no norm where the loss is not finite, so no update."""
    loss = total / weight
    norm = jnp.sqrt(sum(squares[1:], squares[0])) / denominator
    return jnp.where(jnp.isfinite(loss), norm, jnp.nan), loss


def update(
    optimizer: optax.GradientTransformation,
    params: Params,
    state: OptimizerState,
    gradients: Params,
    norm: Float[Array, ""],
    denominator: Float[Array, ""],
    rate: Float[Array, ""],
    *,
    max_norm: float | None,
) -> tuple[Params, OptimizerState]:
    """U: one optimiser step of a stage.

    Args:
      optimizer: a leaf-wise transformation.
      params, state: of the stage's rows.
      gradients: sums over the window.
      norm: norm of the gradients of all stages, divided by the denominator.
      denominator: what the sums are divided by.
      rate: factor on the updates.
      max_norm: gradients are scaled so that `norm` is at most this; None: not at all.

    Returns:
      New params and state; the old ones where the norm is not finite (nor, as `norm_and_loss` has it, the loss).
    """
    scale = 1.0 / denominator
    if max_norm is not None:
        scale = scale * jnp.where(norm < max_norm, 1.0, max_norm / norm)
    finite = jnp.isfinite(norm)
    new_params, new_state = [], []
    for row, row_state, row_gradients in zip(params, state, gradients, strict=True):
        scaled = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), row_gradients)
        updates, updated = optimizer.update(scaled, row_state, row)
        moved = jax.tree.map(lambda leaf, step: leaf + (step * rate).astype(leaf.dtype), row, updates)
        new_params.append(_choose(finite, moved, row))
        new_state.append(_choose(finite, updated, row_state))
    return tuple(new_params), tuple(new_state)


def _choose(finite: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
