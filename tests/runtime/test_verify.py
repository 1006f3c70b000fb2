"""The certificate: what passes, and that it names the layer at fault."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import examples
import mp_lstm
from examples import random_batch, random_params
from mp_lstm.errors import InputError
from mp_lstm.runtime.verify import TOLERANCE, Certificate, RowErrors, relative_error

BATCH = random_batch(np.random.default_rng(0), 4, 3, lengths=[4, 0, 2], resets=[False, True, False])


def model_with(layer: mp_lstm.Layer) -> mp_lstm.Model:
    return mp_lstm.sequential(
        [mp_lstm.embedding(examples.VOCAB, 3), layer, mp_lstm.lstm_layer(3, 3), mp_lstm.softmax_head(3, examples.VOCAB)]
    )


def certificate(layer: mp_lstm.Layer, **planned: Any) -> Certificate:
    model = model_with(layer)
    pipe = examples.pipeline(model, batch_size=3, lengths=(4,), partition=(2, 2), chunk=2, **planned)
    carry = examples.random_carry(model, 3)
    optimizer = examples.recorder()
    params = random_params(model)
    state = pipe.restore(params, [optimizer.init(row) for row in params], key=jax.random.key(0), carry=carry)
    return pipe.verify(state, [BATCH, BATCH])


def test_a_right_layer_passes() -> None:
    """Also one that adds a term to the gradient: it belongs to the sum over both batches, which is divided once."""
    found = certificate(mp_lstm.chain([mp_lstm.dense(3, 3), mp_lstm.temporal_regularisation(3, 2.0)], name="mine"))
    assert found.passed
    assert [row.name for row in found.rows] == ["embed", "mine", "lstm", "head"]
    assert [row.stage for row in found.rows] == [0, 0, 1, 1]
    assert str(found).splitlines()[-1].startswith("passed: largest relative error ")


def test_inputs_of_integers_have_no_gradient() -> None:
    """Features counted in integers train, but JAX's gradient by them, which is none, could not be compared."""
    layer = mp_lstm.dense(5, 4)

    def forward(params: Any, x: Any, state: Any, ctx: Any) -> Any:
        return layer.forward(params, x.astype(jnp.float32), state, ctx)

    counts = layer._replace(forward=forward)
    model = mp_lstm.sequential([counts, mp_lstm.dense(4, 2)], loss=mp_lstm.squared_error)
    batch = mp_lstm.Batch(np.ones((4, 3, 5), np.int32), np.ones((4, 3, 2), np.float32))
    pipe = examples.pipeline(model, batch_size=3, lengths=(4,), partition=(1, 1), chunk=2)
    assert pipe.verify(pipe.init(jax.random.key(0)), batch).passed


@pytest.mark.parametrize("products", [jnp.bfloat16, jnp.float16])
def test_rounded_products_have_a_bound_of_their_own(products: Any) -> None:
    """Their backward rounds what JAX's derivative of their forward does not: a right layer was once called wrong."""
    model = mp_lstm.language_model(vocab=examples.VOCAB, embed=8, hidden=8, layers=3, tie=True, products=products)
    pipe = examples.pipeline(model, batch_size=3, lengths=(4,), partition=(2, 3), chunk=2)
    found = pipe.verify(pipe.init(jax.random.key(0)), BATCH)
    assert found.passed
    assert found.worst > TOLERANCE["float32"]
    assert str(found).splitlines()[-1].endswith(f"allowed in {jnp.dtype(products)}")


def test_a_wrong_layer_beside_rounded_products_is_named() -> None:
    layer = mp_lstm.lstm_layer(3, 3, name="mine", products=jnp.bfloat16)
    found = certificate(wrong_input_gradient(layer, factor=1.1))
    assert not found.passed
    assert found.wrong == ("mine",)


def wrong_input_gradient(layer: mp_lstm.Layer, factor: float = 1.01) -> mp_lstm.Layer:
    def backward(*args: Any) -> Any:
        dx, dstate, tape = layer.backward(*args)
        return factor * dx, dstate, tape

    return layer._replace(backward=backward)


def wrong_weight_gradient(layer: mp_lstm.Layer) -> mp_lstm.Layer:
    def weight_gradient(*args: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.at[0].add(1.0), layer.weight_gradient(*args))

    return layer._replace(weight_gradient=weight_gradient)


def not_a_number(layer: mp_lstm.Layer) -> mp_lstm.Layer:
    def backward(*args: Any) -> Any:
        dx, dstate, tape = layer.backward(*args)
        return jnp.nan * dx, dstate, tape

    return layer._replace(backward=backward)


@pytest.mark.parametrize("fault", [wrong_input_gradient, wrong_weight_gradient, not_a_number])
def test_a_wrong_layer_is_named(fault: Any) -> None:
    """Gradients of the rows below it are wrong too, but only its own backward is at fault."""
    found = certificate(fault(mp_lstm.dense(3, 3, name="mine")))
    assert not found.passed
    assert found.wrong == ("mine",)
    assert str(found).splitlines()[-1] == "failed: the backward of mine is not the derivative of its forward"


def test_a_lean_variant_is_verified_where_it_runs() -> None:
    right = mp_lstm.dense(3, 3, name="mine")
    assert certificate(right._replace(lean=wrong_input_gradient(right)), remat="head").wrong == ("mine",)


def wide_input_gradient(layer: mp_lstm.Layer) -> mp_lstm.Layer:
    def backward(*args: Any) -> Any:
        dx, dstate, tape = layer.backward(*args)
        return jnp.concatenate([dx, dx], axis=-1), dstate, tape

    return layer._replace(backward=backward)


def transposed_weight_gradient(layer: mp_lstm.Layer) -> mp_lstm.Layer:
    def weight_gradient(*args: Any) -> Any:
        gradients = layer.weight_gradient(*args)
        return gradients._replace(bias=gradients.bias[None])

    return layer._replace(weight_gradient=weight_gradient)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            wide_input_gradient,
            r"mine: its backward's dx has arrays of shapes \[\(4, 3, 6\)\], \[\(4, 3, 3\)\] are wanted",
        ),
        (transposed_weight_gradient, r"mine: its weight_gradient has arrays of shapes .*\(1, 3\)\], .* are wanted"),
    ],
)
def test_a_layer_whose_gradient_has_another_shape_is_named(fault: Any, message: str) -> None:
    """The error came from the layer below it."""
    with pytest.raises(InputError, match=message):
        certificate(fault(mp_lstm.dense(3, 3, name="mine")))


def test_a_layer_that_looks_across_chunks_is_hinted_at() -> None:
    def f(params: Any, x: Any, state: Any) -> Any:
        return state, params * x.mean(axis=0, keepdims=True) + x

    found = certificate(mp_lstm.from_function(lambda key: jnp.ones(()), f, name="mine"))
    assert not found.passed
    assert found.wrong == ()
    assert str(found).endswith("does a layer that looks across chunks say chunkable=False?")


def test_a_pipeline_that_is_wrong_by_itself() -> None:
    """Every row's own backward is right."""
    found = Certificate((RowErrors("a", 0, 1e-3, 0.0), RowErrors("b", 1, 0.0, 0.0)), 0.0, 1e-5, "float32")
    assert (found.passed, found.wrong, found.worst) == (False, (), 1e-3)
    assert str(found).splitlines() == [
        "row         stage  pipeline  layer",
        "a               0   1.0e-03  0.0e+00",
        "b               1   0.0e+00  0.0e+00",
        "failed: largest relative error 1.0e-03, 1e-05 allowed in float32; every row's own backward is right: does a "
        "layer that looks across chunks say chunkable=False?",
    ]


def test_relative_errors() -> None:
    assert relative_error([np.array([3.0, 5.0])], [np.array([3.0, 4.0])]) == 0.2
    assert relative_error([np.array([0.5])], [np.array([0.0])]) == 0.5
    assert math.isnan(relative_error([np.array([np.nan]), np.ones(1)], [np.ones(1), np.ones(1)]))


def test_an_error_that_is_not_a_number_never_passes() -> None:
    rows = (RowErrors("a", 0, 0.0, 0.0), RowErrors("b", 1, math.nan, 0.0), RowErrors("c", 1, 0.0, 0.0))
    assert not Certificate(rows, 0.0, 1e-5, "float32").passed


def test_a_gradient_that_is_nothing_but_rounding_is_not_held_to_it() -> None:
    """A softmax does not see what is added to all its logits: what the number's gradient has is rounding."""
    shifted = mp_lstm.from_function(
        lambda key: (jnp.ones(()), jnp.ones((3,))),
        lambda params, x, state: (state, x * params[1][None, None, :] + params[0]),
    )
    model = mp_lstm.sequential([mp_lstm.dense(3, 3), shifted], loss=mp_lstm.softmax_cross_entropy)
    rng = np.random.default_rng(0)
    batch = mp_lstm.Batch(rng.normal(size=(8, 4, 3)).astype(np.float32), rng.integers(0, 3, (8, 4)))
    pipe = examples.pipeline(model, batch_size=4, lengths=(8,), partition=(1, 1), chunk=4)
    state = pipe.init(jax.random.key(0))
    gradient = pipe.value_and_grad(state, batch)[1][1]
    assert abs(float(gradient[0][0])) < 1e-6 < np.abs(gradient[0][1]).max()
    assert pipe.verify(state, batch).passed


def test_fewer_rows_than_were_carried_are_verified() -> None:
    """A step pads them to the plan's rows; the reference took the state of all for that of these."""
    model = mp_lstm.language_model(**examples.SIZES)
    pipe = examples.pipeline(model, batch_size=4, lengths=(4,), partition=(2, 2), chunk=2)
    batches = [random_batch(np.random.default_rng(rows), 4, rows, resets=[False] * rows) for rows in (4, 3)]
    state, _ = pipe.step(pipe.init(jax.random.key(0)), batches[0])
    assert pipe.verify(state, batches[1]).passed
    assert pipe.verify(state, batches[1]._replace(resets=None)).passed
