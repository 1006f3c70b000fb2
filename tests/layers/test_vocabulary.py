"""Vocabularies in parts: `jax.vmap` with a named axis stands for the devices that have them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mp_lstm
from mp_lstm.layers.base import Context
from mp_lstm.layers.decoder import HeadParams, cross_entropy, cross_entropy_of_parts
from mp_lstm.layers.vocabulary import AXIS, local_ids

PARTS = 3


def by_part(function: Any, *arrays: Any) -> Any:
    """What each part has, given its own of the arrays [parts, ...]."""
    return jax.vmap(function, axis_name=AXIS)(*arrays)


def test_ids_of_other_parts_are_out_of_range() -> None:
    found = by_part(lambda _: local_ids(jnp.arange(6), 2), jnp.zeros(PARTS))
    np.testing.assert_array_equal(found, [[0, 1, 2, 2, 2, 2], [2, 2, 0, 1, 2, 2], [2, 2, 2, 2, 0, 1]])


def test_the_loss_of_parts_is_that_of_the_whole(x64: None) -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(7, 12)) * 10, rng.integers(0, 12, 7)
    weights = np.where(np.arange(7) == 2, 0.0, rng.uniform(1, 2, 7))
    loss, errors, scale, *_ = cross_entropy(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights))
    parts = jnp.asarray(logits).reshape(7, PARTS, 4).swapaxes(0, 1)
    losses, part_errors, scales, *_ = by_part(
        lambda part: cross_entropy_of_parts(part, jnp.asarray(targets), jnp.asarray(weights)), parts
    )
    np.testing.assert_allclose(losses, [loss] * PARTS, rtol=1e-13)
    np.testing.assert_allclose(scales, [scale] * PARTS, rtol=1e-13)
    np.testing.assert_allclose(part_errors.swapaxes(0, 1).reshape(7, 12), errors, rtol=1e-12)


def test_a_head_of_parts_sums_the_gradient_of_its_input(x64: None) -> None:
    head = mp_lstm.softmax_head(5, 12, dtype=jnp.float64)
    rng = np.random.default_rng(0)
    params = HeadParams(jnp.asarray(rng.normal(size=(5, 12))), jnp.asarray(rng.normal(size=12)))
    x = jnp.asarray(rng.normal(size=(2, 3, 5)))
    ctx = Context(targets=jnp.asarray(rng.integers(0, 12, (2, 3))), weights=jnp.ones((2, 3)))

    def run(params: HeadParams) -> Any:
        _, loss, saved = head.forward(params, x, (), ctx)
        dx, _, tape = head.backward(params, saved, jnp.asarray(1.0), (), ctx)
        return loss, dx, head.weight_gradient(params, tape, ctx)

    loss, dx, gradient = run(params)
    kernels = params.kernel.reshape(5, PARTS, 4).swapaxes(0, 1)
    losses, dxs, gradients = by_part(run, HeadParams(kernels, params.bias.reshape(PARTS, 4)))
    for k in range(PARTS):
        np.testing.assert_allclose(losses[k], loss, rtol=1e-13)
        np.testing.assert_allclose(dxs[k], dx, rtol=1e-10)
    np.testing.assert_allclose(gradients.kernel.swapaxes(0, 1).reshape(5, 12), gradient.kernel, rtol=1e-10)


def test_an_embedding_of_parts_looks_up_and_adds_its_own_rows() -> None:
    layer = mp_lstm.embedding(6, 2)
    params = layer.init(jax.random.key(0))
    tokens, dy = jnp.asarray([[0, 5, 3], [2, 5, 1]]), jnp.arange(12.0).reshape(2, 3, 2)

    def run(params: Any) -> Any:
        _, y, saved = layer.forward(params, tokens, (), Context())
        _, _, tape = layer.backward(params, saved, dy, (), Context())
        return y, layer.weight_gradient(params, tape, Context()).table

    y, table = run(params)
    ys, tables = by_part(run, type(params)(params.table.reshape(PARTS, 2, 2)))
    np.testing.assert_array_equal(ys, [y] * PARTS)
    np.testing.assert_array_equal(tables.reshape(6, 2), table)
