"""The protocol's own machinery: chains, residual connections, tapes, masks, and layers as differentiable functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mp_lstm
from mp_lstm.layers import base
from mp_lstm.layers.base import Context
from mp_lstm.runtime.verify import plain
from reference import assert_close

TIME, ROWS, SIZE = 5, 3, 4
MASK = jnp.asarray(np.arange(TIME)[:, None] < np.array([5, 0, 2]))


def check_gradients(layer: mp_lstm.Layer, ctx: Context) -> None:
    """A layer's own phases against JAX's derivative of its forward, in float64."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), layer.init(jax.random.key(0)))
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), layer.init_state(ROWS))
    x = jnp.asarray(rng.normal(size=(TIME, ROWS, SIZE)))

    def gradients(run: Any) -> Any:
        def scalar(params: Any, x: Any, state: Any) -> Any:
            state, y = run(layer, params, x, state, ctx)
            return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves((state, y)))

        return jax.jit(jax.grad(scalar, argnums=(0, 1, 2)))(params, x, state)

    assert_close(gradients(base.apply), gradients(plain), 1e-12)


def some_layers() -> list[mp_lstm.Layer]:
    return [
        mp_lstm.dropout(0.4),
        base.residual(mp_lstm.lstm_layer(SIZE, SIZE, dtype=jnp.float64)),
        mp_lstm.dropout(0.2),
        mp_lstm.dense(SIZE, 2, dtype=jnp.float64),
    ]


@pytest.mark.parametrize("mask", [None, MASK])
def test_a_chain_is_a_layer(x64: None, mask: Any) -> None:
    ctx = Context(key=jax.random.key(1), counter=3, mask=mask, train=True)
    check_gradients(base.chain(some_layers()), ctx)


def test_nested_chains_join_their_tapes_part_by_part() -> None:
    summed = mp_lstm.from_function(lambda key: (), lambda params, x, state: (state, x))
    chain = base.chain([base.chain([mp_lstm.dense(2, 2), summed]), mp_lstm.dense(2, 2)])
    assert chain.join == (("time", "sum"), "time")
    tape = (("a", "b"), "c")
    timed, added = base.split_tape(chain.join, tape)
    assert (timed, added) == ((("a", None), "c"), ((None, "b"), None))
    assert base.merge_tape(chain.join, timed, added) == tape


def test_a_chain_cut_in_two_draws_the_same_parameters_and_masks(x64: None) -> None:
    """What makes a partition invisible: a stage knows at which row it begins."""
    layers, key = some_layers(), jax.random.key(2)
    whole, parts = base.chain(layers), [base.chain(layers[:2]), base.chain(layers[2:], first=2)]
    params = whole.init(key)
    halves = [part.init(key) for part in parts]
    assert_close(params, (*halves[0], *halves[1]), 0.0)

    ctx, x = Context(key=key, train=True), jnp.ones((TIME, ROWS, SIZE))
    state, y, _ = whole.forward(params, x, whole.init_state(ROWS), ctx)
    first, middle, _ = parts[0].forward(halves[0], x, parts[0].init_state(ROWS), ctx)
    second, other, _ = parts[1].forward(halves[1], middle, parts[1].init_state(ROWS), ctx)
    assert_close(((*first, *second), other), (state, y), 0.0)


def test_costs_of_a_chain_add_up_and_the_last_output_is_sent() -> None:
    parts = [mp_lstm.dense(3, 8), mp_lstm.dense(8, 2), mp_lstm.dropout(0.5)]
    total = base.chain(parts).cost(4, 6)
    assert total.parameters == 3 * 8 + 8 + 8 * 2 + 2
    assert total.forward == sum(part.cost(4, 6).forward for part in parts)
    assert total.transfer_bytes == parts[1].cost(4, 6).transfer_bytes


def test_a_chain_that_holds_one_that_cannot_be_cut_cannot_be_cut() -> None:
    whole = mp_lstm.from_function(lambda key: (), lambda params, x, state: (state, x), chunkable=False)
    assert not base.chain([mp_lstm.dense(2, 2), whole]).chunkable
    assert base.chain([mp_lstm.dense(2, 2)]).chunkable


def test_residual_adds_its_input_in_prediction_too() -> None:
    layer = mp_lstm.dense(SIZE, SIZE)
    params, x = layer.init(jax.random.key(0)), jnp.ones((TIME, ROWS, SIZE))
    _, alone = layer.infer(params, x, (), Context())
    _, added = base.residual(layer).infer(params, x, (), Context())
    assert_close(added, alone + x, 0.0)


def with_lean(layer: mp_lstm.Layer) -> mp_lstm.Layer:
    """A layer whose lean variant is the layer itself, under another name."""
    return layer._replace(lean=layer._replace(name="lean"))


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda layer: base.chain([mp_lstm.dropout(0.4), layer, mp_lstm.dropout(0.2)], first=3),
        base.residual,
        mp_lstm.two_biases,
        lambda layer: mp_lstm.weight_drop(layer, 0.5),
    ],
    ids=["chain", "residual", "two biases", "weight drop"],
)
def test_what_wraps_a_layer_wraps_its_lean_variant(wrapped: Any) -> None:
    plain = mp_lstm.lstm_layer(SIZE, SIZE, bias_init=jax.nn.initializers.ones)
    layer = wrapped(with_lean(plain))
    assert wrapped(plain).lean is None
    assert layer.lean is not None
    assert layer.lean.lean is None
    params, x = layer.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (TIME, ROWS, SIZE))
    ctx = Context(key=jax.random.key(2), train=True)

    def phases(layer: mp_lstm.Layer) -> Any:
        state, y, saved = layer.forward(params, x, layer.init_state(ROWS), ctx)
        dx, dstate, tape = layer.backward(params, saved, y, state, ctx)
        predicted = layer.infer(params, x, layer.init_state(ROWS), ctx)
        return state, y, dx, dstate, layer.weight_gradient(params, tape, ctx), predicted

    jax.tree.map(np.testing.assert_array_equal, phases(layer.lean), phases(layer))
    assert layer.lean.cost(2, 3) == layer.cost(2, 3)
    _, y, _ = plain.forward(plain.init(jax.random.key(0)), x, plain.init_state(ROWS), ctx)
    assert not np.allclose(phases(layer.lean)[1], y)


def test_apply_has_no_gradient_where_there_is_none() -> None:
    """Tokens are integers, and so is the context."""
    layer = mp_lstm.embedding(7, SIZE)
    tokens = jnp.array([[1, 2], [3, 1]])

    def loss(params: Any, tokens: Any) -> Any:
        return base.apply(layer, params, tokens, (), Context(counter=1))[1].sum()

    params = layer.init(jax.random.key(0))
    dparams, dtokens = jax.grad(loss, argnums=(0, 1), allow_int=True)(params, tokens)
    assert dparams.table.sum(axis=1).tolist() == [0, 2 * SIZE, SIZE, SIZE, 0, 0, 0]
    assert dtokens.dtype == jax.dtypes.float0


def test_masks() -> None:
    assert base.steps_mask(None, 0, 3) is None
    mask = base.steps_mask(jnp.array([5, 0, 3]), 2, 3)
    assert mask is not None
    assert mask.T.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    x = jnp.full((3, 3, 2), jnp.nan)
    assert jnp.isnan(base.mask_steps(mask, x)).sum() == mask.sum() * 2
    assert base.mask_steps(None, x) is x
