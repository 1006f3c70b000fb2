"""The language model's rows, initial values and messages; its mathematics is in tests/test_transparency.py."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
import reference
from examples import VOCAB, random_batch, random_params
from mp_lstm.errors import InputError
from reference import assert_close

SIZES: dict[str, Any] = {"vocab": 11, "embed": 4, "hidden": 6, "layers": 2}


def parameters(model: mp_lstm.Model) -> list[int]:
    return [row.cost(1, 1).parameters for row in model.rows]


def test_rows() -> None:
    model = mp_lstm.language_model(**SIZES, dropout=0.5)
    assert [row.name for row in model.rows] == ["embed", "lstm 1", "lstm 2", "head"]
    assert [row.kind for row in model.rows] == ["embedding", "lstm", "lstm", "head"]
    assert parameters(model) == [44, (4 + 6 + 1) * 24, (6 + 6 + 1) * 24, 7 * 11]


def test_a_size_for_each_layer() -> None:
    model = mp_lstm.language_model(**SIZES | {"hidden": [6, 3]})
    assert parameters(model) == [44, (4 + 6 + 1) * 24, (6 + 3 + 1) * 12, 4 * 11]


def test_a_tied_decoder_owns_its_bias_alone() -> None:
    model = mp_lstm.language_model(**SIZES | {"hidden": [6, 4]}, tie=True)
    assert parameters(model)[-1] == 11
    assert [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))[-1])] == [(11,)]


def test_initial_values() -> None:
    model = mp_lstm.language_model(**SIZES, init_scale=0.1, forget_bias=1.0)
    params = model.init(jax.random.key(0))
    biases = [params[row].bias for row in (1, 2)]
    for bias in biases:
        input_gate, forget_gate, *_ = np.split(np.asarray(bias), 4)
        assert (abs(input_gate) <= 0.1).all()
        assert (abs(forget_gate - 1) <= 0.1).all()
    others = [params[0], *(params[row]._replace(bias=()) for row in (1, 2)), params[3]]
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(others)])
    assert 0.09 < abs(values).max() <= 0.1


AWD: dict[str, Any] = {
    "dropout": 0.25,
    "dropout_input": 0.4,
    "dropout_output": 0.4,
    "dropout_words": 0.1,
    "dropout_locked": True,
    "weight_drop": 0.5,
    "activation_reg": 2.0,
    "temporal_reg": 1.0,
    "tie": True,
}


def test_awd_lstm_equals_the_reference(x64: None) -> None:
    """Its recipe (https://arxiv.org/abs/1708.02182), sizes divided by a hundred: embed 400, hidden 1150, 1150, 400."""
    sizes = {"vocab": 11, "embed": 4, "hidden": (11, 11, 4), "layers": 3}
    model = mp_lstm.language_model(**sizes, **AWD, dtype=jnp.float64)
    assert [row.name for row in model.rows] == ["embed", "lstm 1", "lstm 2", "lstm 3", "head"]
    assert parameters(model) == [44, 44 * (4 + 11 + 1), 44 * (11 + 11 + 1), 16 * (11 + 4 + 1), 11]
    params, key = random_params(model), jax.random.key(3)
    batch = random_batch(np.random.default_rng(0), 5, 3, lengths=[5, 2, 4], weighted=True)
    run = jax.jit(jax.value_and_grad(lambda params: model.loss(params, batch, key=key, counter=7)[0]))
    expected = reference.run(reference.Spec(3, **AWD), params, [batch], key=key, counter=7)
    assert_close(run(params), expected.mean(), 1e-10)


def test_each_rate_has_its_place() -> None:
    """Rates that differ, seen where each mask lies in what F saves: kept shares of many features."""
    rates = {"dropout": 0.5, "dropout_input": 0.1, "dropout_output": 0.9}
    model = mp_lstm.language_model(vocab=5, embed=64, hidden=64, layers=2, **rates)
    whole, key = mp_lstm.chain(model.rows[:-1]), jax.random.key(0)
    inputs, ctx = jnp.zeros((8, 16), int), mp_lstm.Context(key=key, train=True)
    params = random_params(model)[:-1]
    _, _, saved = jax.jit(whole.forward)(params, inputs, whole.init_state(16), ctx)
    masks = [leaf for leaf in jax.tree.leaves(saved) if leaf.dtype == bool]
    np.testing.assert_allclose([mask.mean() for mask in masks], [0.9, 0.5, 0.1], atol=0.03)


def test_a_scale_for_each_row() -> None:
    def largest(model: mp_lstm.Model) -> list[float]:
        rows = jax.jit(model.init)(jax.random.key(0))
        return [max(float(abs(leaf).max()) for leaf in jax.tree.leaves(row)) for row in rows]

    scales = (0.1, 0.02, 0.03, 0.4)
    untied = mp_lstm.language_model(**SIZES, init_scale=scales)
    np.testing.assert_allclose(largest(untied), scales, rtol=0.15)
    tied = mp_lstm.language_model(**SIZES | {"hidden": 4}, tie=True, init_scale=scales[:-1])
    np.testing.assert_allclose(largest(tied), [*scales[:-1], 0], rtol=0.15)


def test_initialisers_for_all_layers_or_one_each() -> None:
    constant = jax.nn.initializers.constant
    model = mp_lstm.language_model(
        **SIZES, init_scale=0.1, kernel_init=constant(2.0), recurrent_init=[constant(3.0), constant(4.0)]
    )
    _, first, second, _ = model.init(jax.random.key(0))
    assert {float(value) for layer in (first, second) for value in np.unique(layer.kernel)} == {2.0}
    assert (first.recurrent_kernel == 3).all()
    assert (second.recurrent_kernel == 4).all()
    assert 0 < abs(first.bias).max() <= 0.1


def test_training_with_bfloat16_products_stays_close_to_float32() -> None:
    """Losses of twenty steps within 0.1%; parameters and gradients are float32, only products' operands are not."""
    sizes = {"vocab": 11, "embed": 8, "hidden": 8, "layers": 2, "dropout": 0.2}
    batch, key = random_batch(np.random.default_rng(0), 6, 4), jax.random.key(1)

    def losses(products: Any) -> np.ndarray:
        model, optimizer = mp_lstm.language_model(**sizes, products=products), optax.adam(0.01)
        params = random_params(model, scale=0.3)
        run = jax.value_and_grad(lambda params, i: model.loss(params, batch, key=key, counter=i)[0])

        def step(carry: Any, i: jax.Array) -> Any:
            params, kept = carry
            loss, gradients = run(params, i)
            assert {leaf.dtype.name for leaf in jax.tree.leaves((params, gradients))} == {"float32"}
            updates, kept = optimizer.update(gradients, kept)
            return (optax.apply_updates(params, updates), kept), loss

        return np.asarray(
            jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(20)))((params, optimizer.init(params)))[1]
        )

    rounded, exact = losses(jnp.bfloat16), losses(None)
    assert (rounded != exact).all()
    assert exact[-1] < 0.95 * exact[0]
    np.testing.assert_allclose(rounded, exact, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0, wanted at least 1"),
        ({"hidden": [6]}, "hidden gives 1 sizes, the model has 2 layers: give one size a layer, or one number"),
        ({"hidden": 0}, "lstm 1: hidden is 0, wanted at least 1"),
        ({"vocab": 0}, "vocab is 0, wanted at least 1"),
        ({"embed": -1}, "embed is -1, wanted at least 1"),
        ({"tie": True}, "tie: the last hidden size is 6 and embed is 4: a tied decoder needs them equal"),
        ({"residual_from": 3}, "residual_from is 3, a layer from 1 to 2 is wanted"),
        ({"init_scale": float("inf")}, "init_scale is inf, a positive number is wanted"),  # all weights were NaN
        ({"init_scale": 0.0}, "init_scale is 0.0, a positive number is wanted"),
        (
            {"init_scale": 1e39},
            r"init_scale is 1e\+39, a positive number is wanted: pass one that float32 holds, 1.2e-38 to",
        ),
        (
            {"init_scale": 3e38},
            r"init_scale is 3e\+38, a positive number is wanted: .* to 1.7e\+38",
        ),  # its width is 6e38
        ({"init_scale": 1e-50}, "init_scale is 1e-50, a positive number is wanted"),  # all weights were 0
        ({"init_scale": True}, "init_scale is True, a positive number is wanted"),
        ({"forget_bias": 1e39}, r"forget_bias is 1e\+39, a finite number is wanted: pass one that float32 holds"),
        ({"forget_bias": float("nan")}, "forget_bias is nan, a finite number is wanted"),
        ({"temporal_reg": 1e39}, r"temporal regularisation: the factor is 1e\+39, a finite number of at least 0"),
        ({"residual_from": True}, "residual_from is True, a layer from 1 to 2 is wanted"),
        ({"dropout": 1.0}, r"dropout: the rate is 1.0, a number in \[0, 1\) is wanted"),
        ({"dropout_output": -0.5}, r"dropout: the rate is -0.5, a number in \[0, 1\) is wanted"),
        ({"dropout_words": 1.0}, r"embed: the rate is 1.0, a number in \[0, 1\) is wanted"),
        ({"weight_drop": 1.0}, r"weight_drop of lstm 1: the rate is 1.0, a number in \[0, 1\) is wanted"),
        ({"activation_reg": -1.0}, "activation regularisation: the factor is -1.0, a finite number of at least 0"),
        (
            {"init_scale": [0.1]},
            "init_scale gives 1 numbers, 4 are wanted: one each for the embedding, the 2 LSTM layers and the head, or",
        ),
        ({"init_scale": [0.1] * 4, "tie": True, "hidden": 4}, "4 numbers, 3 are wanted: .* the 2 LSTM layers, or one"),
        ({"init_scale": [0.1, 0.1, -1.0, 0.1]}, "init_scale is -1.0, a positive number is wanted"),
        (
            {"recurrent_init": [jax.nn.initializers.zeros]},
            "recurrent_init gives 1 initialisers, the model has 2 layers: give one a layer, or one for all",
        ),
        ({"unroll": 17}, "unroll is 17, 1 to 16 is wanted"),
    ],
)
def test_refuses_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mp_lstm.language_model(**SIZES | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2.0}, "layers is 2.0, wanted an integer: pass a whole number of at least 1"),
        ({"vocab": "11"}, "vocab is '11', wanted an integer"),
        ({"hidden": 6.0}, "lstm 1: hidden is 6.0, wanted an integer"),  # it had no len()
        ({"hidden": "66"}, "lstm 1: hidden is '66', wanted an integer"),
        ({"hidden": [6, 2.5]}, "lstm 2: hidden is 2.5, wanted an integer"),
        ({"hidden": None}, "lstm 1: hidden is None, wanted an integer"),
        ({"residual_from": "2"}, "residual_from is '2', a layer from 1 to 2 is wanted"),
        ({"residual_from": 1.5}, "residual_from is 1.5, a layer from 1 to 2 is wanted"),
        ({"init_scale": "0.1"}, "init_scale is '0.1', a positive number is wanted"),
        ({"forget_bias": "1"}, "forget_bias is '1', a finite number is wanted"),
        ({"products": "nope"}, "lstm 1: products is 'nope', one of float16, bfloat16, .* is wanted"),
    ],
)
def test_refuses_what_is_no_number(changes: dict[str, Any], message: str) -> None:
    """As users call it: without the tests' own check of types."""
    with pytest.raises(InputError, match=message):
        inspect.unwrap(mp_lstm.language_model)(**SIZES | changes)


def test_sizes_may_be_numpys() -> None:
    """They were refused, or had no len()."""
    sizes = {name: np.int64(size) for name, size in SIZES.items()}
    model = mp_lstm.language_model(**sizes, residual_from=np.int64(2))
    assert parameters(model) == parameters(mp_lstm.language_model(**SIZES, residual_from=2))
    scale = np.float32(0.1)
    model = inspect.unwrap(mp_lstm.language_model)(**SIZES | {"hidden": np.array([6, 3])}, init_scale=scale)
    assert parameters(model) == [44, (4 + 6 + 1) * 24, (6 + 3 + 1) * 12, 4 * 11]


def test_sizes_may_be_an_array_of_jax() -> None:
    """One of numpy was taken for several sizes, one of JAX for a wrong one."""
    sizes = {"vocab": VOCAB, "embed": 4, "hidden": jnp.array([4, 6]), "layers": 2}
    model = inspect.unwrap(mp_lstm.language_model)(**sizes)
    assert model.init(jax.random.key(0))[2].recurrent_kernel.shape == (6, 24)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_can_be_drawn(dtype: str) -> None:
    """JAX has no orthogonal matrices of them."""
    params = mp_lstm.language_model(vocab=VOCAB, embed=4, hidden=4, layers=1, dtype=dtype).init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    kernel = np.asarray(params[1].recurrent_kernel, np.float64)
    np.testing.assert_allclose(kernel @ kernel.T, np.eye(4), atol=0.02)
