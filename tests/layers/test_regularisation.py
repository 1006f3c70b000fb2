"""Regularised activations: the gradient is that of the papers' terms, however time is cut; the value is the loss's."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mp_lstm
import reference
from examples import VOCAB, random_batch, random_params
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, steps_mask
from reference import assert_close

TIME, ROWS, SIZE = 6, 4, 3
LENGTHS = (6, 0, 1, 4)
FACTOR = 0.7


def activation_term(x: Any) -> Any:
    """By loops over what is real: FACTOR times the mean square."""
    return FACTOR * sum(jnp.square(x[t, b]).mean() for b, length in enumerate(LENGTHS) for t in range(length))


def temporal_term(x: Any) -> Any:
    """By loops over what is real, but for each row's first step."""
    moved = ((x[t, b] - x[t - 1, b]) for b, length in enumerate(LENGTHS) for t in range(1, length))
    return FACTOR * sum(jnp.square(step).mean() for step in moved)


def added(layer: mp_lstm.Layer, x: jax.Array, state: Any, chunk: int, **ctx: Any) -> tuple[jax.Array, Any, jax.Array]:
    """What B adds to dy over chunks of time, the state after, and y."""
    contexts, saved, outputs = [], [], []
    for start in range(0, TIME, chunk):
        part = x[start : start + chunk]
        mask = steps_mask(jnp.array(LENGTHS), start, len(part))
        contexts.append(Context(**{"start": start, "mask": mask, "train": True} | ctx))
        state, y, kept = layer.forward((), part, state, contexts[-1])
        saved.append(kept)
        outputs.append(y)
    gradients, dstate = [], jax.tree.map(jnp.zeros_like, state)
    for context, kept in zip(reversed(contexts), reversed(saved), strict=True):
        dx, dstate, _ = layer.backward((), kept, jnp.full(kept[0].shape, 10.0), dstate, context)
        gradients.append(dx - 10.0)
    return jnp.concatenate(gradients[::-1]), state, jnp.concatenate(outputs)


def test_any_chunks_add_the_gradient_of_the_whole(x64: None) -> None:
    """Whatever state was carried into the batch: a difference lies within it."""
    x, carried = jax.random.normal(jax.random.key(0), (TIME, ROWS, SIZE)), jnp.full((ROWS, SIZE), 5.0)
    wanted = jax.jit(jax.grad(activation_term))(x)
    for chunk in (4, 6):
        found, _, y = jax.jit(lambda x, chunk=chunk: added(mp_lstm.activation_regularisation(FACTOR), x, (), chunk))(x)
        assert (y == x).all()
        np.testing.assert_allclose(found, wanted, atol=1e-14)
    wanted = jax.jit(jax.grad(temporal_term))(x)
    layer = mp_lstm.temporal_regularisation(SIZE, FACTOR, dtype=jnp.float64)
    for chunk in (1, 4, 6):
        found, state, y = jax.jit(lambda x, state, chunk=chunk: added(layer, x, state, chunk))(x, carried)
        assert (y == x).all()
        np.testing.assert_allclose(found, wanted, atol=1e-14)
        assert (state == jnp.stack([x[5, 0], carried[1], x[0, 2], x[3, 3]])).all()


def test_jax_differentiates_forward_alike(x64: None) -> None:
    """A certificate (`Pipeline.verify`) takes JAX's derivative of F."""
    x, state = jax.random.normal(jax.random.key(0), (TIME, ROWS, SIZE)), jnp.zeros((ROWS, SIZE))
    ctx = Context(mask=steps_mask(jnp.array(LENGTHS), 0, TIME), train=True)
    layer = mp_lstm.temporal_regularisation(SIZE, FACTOR, dtype=jnp.float64)
    gradient = jax.jit(jax.grad(lambda x: layer.forward((), x, state, ctx)[1].sum()))(x)
    np.testing.assert_allclose(gradient, 1 + jax.jit(jax.grad(temporal_term))(x), atol=1e-14)


def test_nothing_is_added_outside_training() -> None:
    x, state = jnp.ones((TIME, ROWS, SIZE)), jnp.zeros((ROWS, SIZE))
    layer = mp_lstm.temporal_regularisation(SIZE, FACTOR)
    found, after, _ = added(layer, x, state, 2, train=False)
    assert (found == 0).all()
    assert after is state
    assert layer.infer((), x, state, Context(train=True))[1] is x
    assert (added(mp_lstm.activation_regularisation(FACTOR), x, (), 2, train=False)[0] == 0).all()


def test_the_loss_of_a_model_keeps_its_value_and_gains_the_gradient(x64: None) -> None:
    """In any multiple of it; the terms are divided by what the loss is divided by."""
    sizes = {"vocab": VOCAB, "embed": 3, "hidden": 4, "layers": 1, "dtype": jnp.float64}
    model = mp_lstm.language_model(**sizes, activation_reg=2.0, temporal_reg=1.0)
    params, key = random_params(model), jax.random.key(0)
    batch = random_batch(np.random.default_rng(0), 5, 4, lengths=[5, 0, 3, 1])

    def minimised(params: Any, multiple: float) -> Any:
        return multiple * model.loss(params, batch, key=key)[0]

    run = jax.jit(jax.value_and_grad(minimised))
    loss, gradients = run(params, 1.0)
    spec = reference.Spec(1, activation_reg=2.0, temporal_reg=1.0)
    assert_close((loss, gradients), reference.run(spec, params, [batch], key=key).mean(), 1e-10)
    assert_close(run(params, 3.0), (3 * loss, jax.tree.map(lambda leaf: 3 * leaf, gradients)), 1e-12)


@pytest.mark.parametrize("factor", [-1.0, float("inf"), float("nan")])
def test_refuses_a_factor_that_is_none(factor: float) -> None:
    message = f"slow: the factor is {factor}, a finite number of at least 0 is wanted"
    with pytest.raises(InputError, match=message):
        mp_lstm.temporal_regularisation(3, factor, name="slow")
    with pytest.raises(InputError, match=message):
        mp_lstm.activation_regularisation(factor, name="slow")
    with pytest.raises(InputError, match="slow: size is 0, wanted at least 1: pass a positive number"):
        mp_lstm.temporal_regularisation(0, 1.0, name="slow")


def test_refuses_a_layer_for_a_number() -> None:
    """The message was the whole record, all its functions, or none."""
    layer, message = mp_lstm.dense(3, 3, name="top"), "the factor is the Layer 'top', a finite number of at least 0 is"
    with pytest.raises(InputError, match=r"^slow: size is the Layer 'top', wanted an integer: pass a whole number"):
        inspect.unwrap(mp_lstm.temporal_regularisation)(layer, 1.0, name="slow")
    with pytest.raises(InputError, match=f"^slow: {message}"):
        inspect.unwrap(mp_lstm.temporal_regularisation)(3, layer, name="slow")
    with pytest.raises(InputError, match=f"^small: {message}"):
        inspect.unwrap(mp_lstm.activation_regularisation)(layer, name="small")


@pytest.mark.parametrize("factor", [1e39, "1", None, True])
def test_refuses_a_factor_that_float32_does_not_hold(factor: Any) -> None:
    """Gradients were not finite with 1e39."""
    message = "^slow: the factor is .*, a finite number of at least 0 is wanted: pass one that float32 holds, 0 to"
    with pytest.raises(InputError, match=message):
        inspect.unwrap(mp_lstm.temporal_regularisation)(3, factor, name="slow")
    with pytest.raises(InputError, match=message):
        inspect.unwrap(mp_lstm.activation_regularisation)(factor, name="slow")
