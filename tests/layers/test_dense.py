"""The dense layer: a product, a bias, and nothing on padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, apply
from reference import assert_close


def test_outputs_and_gradients(x64: None) -> None:
    rng = np.random.default_rng(0)
    layer = mp_lstm.dense(3, 2, dtype=jnp.float64)
    params = mp_lstm.DenseParams(jnp.asarray(rng.normal(size=(3, 2))), jnp.asarray(rng.normal(size=2)))
    x, weights = jnp.asarray(rng.normal(size=(4, 5, 3))), jnp.asarray(rng.normal(size=(4, 5, 2)))
    mask = jnp.asarray(rng.random((4, 5)) < 0.7)

    def ours(params: mp_lstm.DenseParams, x: jax.Array) -> jax.Array:
        return (weights * apply(layer, params, x, (), Context(mask=mask))[1]).sum()

    def textbook(params: mp_lstm.DenseParams, x: jax.Array) -> jax.Array:
        y = jnp.einsum("tbd,dh->tbh", x, params.kernel) + params.bias[None, None, :]
        return (weights * y * mask[:, :, None]).sum()

    actual, expected = (jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(params, x) for run in (ours, textbook))
    assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize(("sizes", "message"), [((0, 2), "inputs is 0"), ((2, -1), "outputs is -1")])
def test_refuses_sizes_that_are_none(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=f"top: {message}, wanted at least 1: pass a positive number"):
        mp_lstm.dense(*sizes, name="top")
