"""The leaf-wise probe, the norm, and an update of one stage against optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mp_lstm.errors import InputError
from mp_lstm.runtime import optimizer as optimizers
from mp_lstm.runtime.optimizer import check_leafwise
from reference import assert_close


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(1e-3, weight_decay=0.1),
        optax.lion(1e-3),
        optax.lamb(1e-3),
        optax.chain(optax.clip(1.0), optax.adam(optax.linear_schedule(1e-3, 0.0, 10))),
        optax.adaptive_grad_clip(0.1),
        optax.adan(1e-3, b2=0.5),
        optax.optimistic_adam_v2(1e-3, alpha=0.5),
    ],
    ids=["momentum", "adamw", "lion", "lamb", "clip by value", "adaptive clip", "adan", "optimistic adam"],
)
def test_takes_what_treats_each_leaf_alone(optimizer: optax.GradientTransformation) -> None:
    """Adan and optimistic Adam subtract: of what nearly cancels out, rounding was taken for another leaf's part."""
    check_leafwise(optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(50.0), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1e-6)),
    ],
    ids=["clip_by_global_norm", "normalize_by_update_norm", "clip at 50", "clip at 1e6", "tiny updates"],
)
def test_refuses_what_mixes_leaves(optimizer: optax.GradientTransformation) -> None:
    """Of every size: a clip at 50 was not seen with gradients of one size alone."""
    with pytest.raises(InputError, match=r"mixes the leaves .* pass max_norm=... to make_pipeline"):
        check_leafwise(optimizer)


def test_refuses_what_needs_more_than_gradients() -> None:
    def update(updates: Any, state: Any, params: Any, *, value: Any) -> Any:
        return updates, state

    needy = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with pytest.raises(InputError, match=r"the optimizer needs more than gradients, state and parameters: .*'value'"):
        check_leafwise(needy)


def test_refuses_what_cannot_update_any_tree() -> None:
    """A mask by the names of a model's leaves: rows are updated one by one, each a tree of its own."""
    masked = optax.masked(optax.sgd(0.1), {"kernel": True, "bias": False})
    with pytest.raises(InputError, match=r"the optimizer cannot update a tree of two small leaves \(.*\): .* function"):
        check_leafwise(masked)
    with pytest.raises(InputError, match=r"^the optimizer cannot update a tree of two small leaves \(.*'fast'"):
        check_leafwise(optax.lookahead(optax.sgd(0.1), 3, 0.5))


@pytest.mark.parametrize("optimizer", ["adam", None, optax.adam])
def test_refuses_what_is_no_optimizer(optimizer: Any) -> None:
    with pytest.raises(
        InputError, match=r"the optimizer is .*, an optax transformation is wanted: pass e.g. optax.adam"
    ):
        check_leafwise(optimizer)


ROWS = ({"a": (2, 3)}, {"b": (4,), "c": ()})


def draw(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return tuple({name: jnp.asarray(rng.normal(size=shape)) for name, shape in row.items()} for row in ROWS)


def test_square_norm(x64: None) -> None:
    gradients = draw(0)
    assert_close(jnp.sqrt(optimizers.square_norm(gradients)), optax.tree.norm(gradients), 1e-12)
    assert optimizers.square_norm(()) == 0


@pytest.mark.parametrize(("total", "norm"), [(6.0, 2.5), (np.inf, np.nan), (np.nan, np.nan)])
def test_there_is_no_norm_where_the_loss_is_not_finite(total: float, norm: float) -> None:
    """So nothing is updated: gradients can be finite nevertheless, and then parameters moved."""
    squares = (jnp.float32(9.0), jnp.float32(16.0))
    found = optimizers.norm_and_loss(squares, jnp.float32(2.0), jnp.float32(total), jnp.float32(3.0))
    np.testing.assert_array_equal(found, [norm, total / 3])


@pytest.mark.parametrize("max_norm", [None, 0.1, 100.0])
def test_an_update_equals_optax(x64: None, max_norm: float | None) -> None:
    """Sums divided, clipped by the norm of all stages, the updates times the rate."""
    optimizer, params, sums = optax.adam(0.1), draw(0), draw(1)
    whole = optimizer if max_norm is None else optax.chain(optax.clip_by_global_norm(max_norm), optimizer)
    mean = jax.tree.map(lambda leaf: leaf / 4, sums)
    updates, _ = whole.update(mean, whole.init(params), params)
    expected = jax.tree.map(lambda p, u: p + 0.5 * u, params, updates)

    scalars = [jnp.asarray(value) for value in (optax.tree.norm(mean), 4.0, 0.5)]
    state = optimizers.init(optimizer, params)
    after, kept = optimizers.update(optimizer, params, state, sums, *scalars, max_norm=max_norm)
    assert_close(after, expected, 1e-12)
    assert len(kept) == len(ROWS)


@pytest.mark.parametrize("norm", [np.nan, np.inf])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_nothing_changes_where_the_norm_is_not_finite(norm: float, max_norm: float | None) -> None:
    optimizer, params = optax.adam(0.1), draw(0)
    state = optimizers.init(optimizer, params)
    gradients = jax.tree.map(lambda leaf: leaf * norm, draw(1))
    scalars = [jnp.float32(value) for value in (norm, 1.0, 1.0)]
    after, kept = optimizers.update(optimizer, params, state, gradients, *scalars, max_norm=max_norm)
    assert_close((after, kept), (params, state), 0.0)
