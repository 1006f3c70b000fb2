"""Heads against optax: loss, gradients, weights and ties."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Borrowed, Context, apply
from reference import assert_close

TIME, ROWS, HIDDEN, VOCAB = 3, 4, 5, 11


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients(x64: None, tied: bool) -> None:
    """Scaled by a number other than one, as in a chain of rules."""
    rng = np.random.default_rng(0)
    table, bias = jnp.asarray(rng.normal(size=(VOCAB, HIDDEN))), jnp.asarray(rng.normal(size=VOCAB))
    x, weights = jnp.asarray(rng.normal(size=(TIME, ROWS, HIDDEN))), jnp.asarray(rng.uniform(size=(TIME, ROWS)))
    targets = jnp.asarray(rng.integers(0, VOCAB, (TIME, ROWS)))
    head = mp_lstm.softmax_head(HIDDEN, VOCAB, tied=tied, dtype=jnp.float64)
    ctx = Context(targets=targets, weights=weights)

    def params(table: Any, bias: Any) -> Any:
        if tied:
            return Borrowed(mp_lstm.TiedHeadParams(bias), mp_lstm.EmbeddingParams(table))
        return mp_lstm.HeadParams(table.T, bias)

    def ours(table: Any, bias: Any, x: Any) -> Any:
        return 3.0 * apply(head, params(table, bias), x, (), ctx)[1]

    def textbook(table: Any, bias: Any, x: Any) -> Any:
        logits = jnp.einsum("tbh,vh->tbv", x, table) + bias[None, None, :]
        return 3.0 * (weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets)).sum()

    actual, expected = (jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(table, bias, x) for run in (ours, textbook))
    assert_close(actual, expected, 1e-12)


def test_predictions_are_logits() -> None:
    head = mp_lstm.softmax_head(HIDDEN, VOCAB)
    params = mp_lstm.HeadParams(jnp.ones((HIDDEN, VOCAB)), jnp.arange(float(VOCAB)))
    _, logits = head.infer(params, jnp.ones((TIME, ROWS, HIDDEN)), (), Context())
    assert_close(logits, jnp.broadcast_to(HIDDEN + jnp.arange(float(VOCAB)), (TIME, ROWS, VOCAB)), 0.0)


def test_without_weights_every_step_counts_once() -> None:
    head = mp_lstm.softmax_head(HIDDEN, VOCAB, kernel_init=jax.nn.initializers.zeros)
    ctx = Context(targets=jnp.zeros((TIME, ROWS), int))
    _, loss, _ = head.forward(head.init(jax.random.key(0)), jnp.ones((TIME, ROWS, HIDDEN)), (), ctx)
    assert_close(loss, TIME * ROWS * np.log(VOCAB), 1e-6)


def test_losses_for_sequential() -> None:
    targets, weights = jnp.ones((TIME, ROWS), int), jnp.full((TIME, ROWS), 0.5)
    loss = mp_lstm.softmax_cross_entropy(jnp.zeros((TIME, ROWS, VOCAB)), targets, weights)
    assert_close(loss, 0.5 * TIME * ROWS * np.log(VOCAB), 1e-6)
    dense = jnp.ones((TIME, ROWS, 2))
    assert mp_lstm.squared_error(3 * dense, dense, weights) == 0.5 * TIME * ROWS * 4


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (
            mp_lstm.softmax_cross_entropy,
            jnp.ones((TIME, ROWS, 1), int),
            r"targets are int32 \[3, 4, 1\], a whole number",
        ),
        (mp_lstm.softmax_cross_entropy, jnp.ones((TIME, ROWS, VOCAB)), "pass classes, and neither one-hot vectors nor"),
        (mp_lstm.softmax_cross_entropy, jnp.ones((TIME, ROWS)), r"targets are float32 \[3, 4\], a whole number"),
        (mp_lstm.squared_error, jnp.ones((TIME, ROWS, 1)), r"targets are float32 \[3, 4, 1\], the predictions .*11\]"),
        (mp_lstm.squared_error, jnp.ones((TIME, ROWS)), "pass targets of the predictions' shape"),
    ],
)
def test_losses_refuse_targets_of_another_shape(loss: Any, targets: Any, message: str) -> None:
    """Targets [T, B, 1] were stretched over all features."""
    with pytest.raises(InputError, match=f"{loss.__name__}: .*{message}"):
        loss(jnp.zeros((TIME, ROWS, VOCAB)), targets, jnp.ones((TIME, ROWS)))


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_a_class_out_of_range_has_no_loss(target: int) -> None:
    """The class -1 was the last one."""
    targets = jnp.zeros((TIME, ROWS), int).at[1, 1].set(target)
    assert jnp.isnan(mp_lstm.softmax_cross_entropy(jnp.zeros((TIME, ROWS, VOCAB)), targets, jnp.ones((TIME, ROWS))))


def test_a_loss_needs_targets() -> None:
    head = mp_lstm.loss_head(mp_lstm.squared_error, name="error")
    with pytest.raises(InputError, match=r"error: the batch has no targets: pass Batch\(inputs, targets=...\)"):
        head.forward((), jnp.ones((1, 1, 1)), (), Context())


def test_refuses_sizes_that_are_none() -> None:
    with pytest.raises(InputError, match="out: vocab is 0, wanted at least 1: pass a positive number"):
        mp_lstm.softmax_head(3, 0, name="out")


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda predictions, targets, weights: weights * predictions[:, :, 0], r"float32 \[3, 4\]"),
        (lambda predictions, targets, weights: predictions.sum(keepdims=True), r"float32 \[1, 1, 1\]"),
        (lambda predictions, targets, weights: (predictions.sum(), 12), "a tuple"),
        (lambda predictions, targets, weights: None, "None"),
        (lambda predictions, targets, weights: jnp.int32(predictions.sum()), r"int32 \[\]"),
    ],
)
def test_a_loss_is_one_number(loss: Any, got: str) -> None:
    """It was an error of division, of `jax.grad` or of programs that do not fit, and named no layer."""
    model = mp_lstm.sequential([mp_lstm.dense(2, 2)], loss=loss)
    batch = mp_lstm.Batch(np.ones((TIME, ROWS, 2), np.float32), np.ones((TIME, ROWS, 2), np.float32))
    message = rf"^loss: its function gave {got}, wanted one floating number: return the weighted sum over steps"
    with pytest.raises(InputError, match=message):
        model.loss(model.init(jax.random.key(0)), batch)
