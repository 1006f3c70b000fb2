"""Two biases: one that is kept trains as two would, by SGD with momentum, clipped by the global norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
from examples import random_batch
from mp_lstm.errors import InputError
from reference import assert_close

KEY = jax.random.key(3)
SIZES: dict[str, Any] = {"vocab": 12, "embed": 4, "hidden": 4, "layers": 2, "init_scale": 0.5}


def loss_of_two(params: Any, batch: mp_lstm.Batch) -> jax.Array:
    """The loss of a model of one bias, of parameters that have two."""
    added = [row._replace(bias=sum(row.bias)) if hasattr(row, "recurrent_kernel") else row for row in params]
    return mp_lstm.language_model(**SIZES, dtype=jnp.float64).loss(tuple(added), batch)[0]


def test_it_trains_as_two_do(x64: None) -> None:
    optimizer, batch = optax.sgd(0.5, momentum=0.5), random_batch(np.random.default_rng(0), 6, 4)
    model = mp_lstm.language_model(**SIZES, biases=2, dtype=jnp.float64)
    plan = mp_lstm.make_plan(model, batch_size=4, lengths=(6,), devices=jax.devices()[:2], partition=(2, 2), chunk=2)
    pipe = mp_lstm.make_pipeline(model, plan, optimizer, max_norm=0.1)
    state = pipe.init(KEY)

    def halved(row: Any) -> Any:
        """A row with two biases instead of one: any two with that sum."""
        if not hasattr(row, "recurrent_kernel"):
            return row
        bias = row.bias * np.sqrt(2.0)
        return row._replace(bias=(0.25 * bias, 0.75 * bias))

    two = tuple(map(halved, pipe.params(state)))
    by_hand = optax.chain(optax.clip_by_global_norm(0.1), optimizer)
    moments = by_hand.init(two)
    for _ in range(4):
        state, metrics = pipe.step(state, batch)
        loss, gradient = jax.value_and_grad(loss_of_two)(two, batch)
        assert_close(metrics.loss, loss, 1e-10)
        assert_close(metrics.grad_norm, optax.tree.norm(gradient), 1e-10)
        assert float(metrics.grad_norm) > 0.1  # or clipping would not be tested
        updates, moments = by_hand.update(gradient, moments, two)
        two = optax.apply_updates(two, updates)
    for row, ours in zip(two, pipe.params(state), strict=True):
        if hasattr(row, "recurrent_kernel"):
            row = row._replace(bias=sum(row.bias) / np.sqrt(2.0))
        assert_close(ours, row, 1e-10)


def test_each_is_drawn_as_the_layers_own() -> None:
    layer = mp_lstm.lstm_layer(3, 500, bias_init=jax.nn.initializers.normal(0.1))
    plain, both = layer.init(KEY), mp_lstm.two_biases(layer).init(KEY)
    assert (both.kernel == plain.kernel).all()
    total = both.bias * np.sqrt(2.0)
    assert abs(float(total.std()) - 0.1 * np.sqrt(2.0)) < 0.01
    assert abs(float(jnp.corrcoef(total, plain.bias)[0, 1]) - 1 / np.sqrt(2.0)) < 0.08


def test_the_forget_gates_bias_is_that_of_the_sum() -> None:
    one, two = (mp_lstm.language_model(**SIZES | {"init_scale": None}, forget_bias=1.0, biases=n) for n in (1, 2))
    first, both = (model.init(KEY)[1].bias for model in (one, two))
    np.testing.assert_allclose(both * np.sqrt(2.0), first, rtol=1e-6)


def test_predictions_and_prepared_weights_are_those_of_the_sum() -> None:
    layer = mp_lstm.lstm_layer(3, 5, products=jnp.bfloat16, bias_init=jax.nn.initializers.normal(1.0))
    both, x = mp_lstm.two_biases(layer), jnp.ones((4, 2, 3))
    params, state = both.init(KEY), layer.init_state(2)
    expected = layer.infer(params._replace(bias=params.bias * np.sqrt(2.0)), x, state, mp_lstm.layers.base.Context())
    for given in (params, both.prepare(params)):
        found = both.infer(given, x, state, mp_lstm.layers.base.Context())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_a_layer_without_a_bias_is_refused() -> None:
    with pytest.raises(InputError, match="two_biases: dropout has no bias among its parameters: wrap an lstm_layer"):
        mp_lstm.two_biases(mp_lstm.dropout(0.5))


def test_other_numbers_of_biases_are_refused() -> None:
    with pytest.raises(InputError, match="biases is 3, 1 or 2 is wanted"):
        mp_lstm.language_model(**SIZES, biases=3)
