"""The cross-entropy of logits: numbers that overflow a naive softmax, and errors that are found a second time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mp_lstm.layers.decoder import cross_entropy, cross_entropy_of_parts, errors_again
from mp_lstm.layers.vocabulary import AXIS, local_ids
from reference import assert_close


def test_extreme_logits_stay_finite() -> None:
    logits = jnp.array([[1e4, 0.0, -1e4], [0.0, 0.0, 1e30]])
    loss, errors, scale, *_ = cross_entropy(logits, jnp.array([2, 2]), jnp.array([1.0, 1.0]))
    assert loss == 2e4
    assert (errors * scale[:, None]).tolist() == [[1, 0, -1], [0, 0, 0]]


def test_what_has_no_weight_may_be_anything() -> None:
    """A target beyond the vocabulary, features that overflow: padding is not looked at."""
    logits = jnp.array([[1.0, 2.0], [jnp.inf, 2.0]])
    loss, *_ = cross_entropy(logits, jnp.array([1, 99]), jnp.array([1.0, 0.0]))
    assert_close(loss, np.log(1 + np.exp(-1.0)), 1e-6)


def test_the_loss_and_its_gradient_share_their_exponentials() -> None:
    """Left alone, XLA computed them twice, once to sum and once to return them: a third of the head's F."""
    logits = jax.ShapeDtypeStruct((64, 4000), jnp.float32)
    vectors = [jax.ShapeDtypeStruct((64,), dtype) for dtype in (jnp.int32, jnp.float32)]
    assert jax.jit(cross_entropy).lower(logits, *vectors).compile().as_text().count(" exponential(") == 1


def test_errors_are_found_again(x64: None) -> None:
    """Of the whole vocabulary, and by three parts that each know what they found of it together."""
    rng = np.random.default_rng(0)
    logits, targets = jnp.asarray(rng.normal(size=(7, 12)) * 10), jnp.asarray(rng.integers(0, 12, 7))
    found = cross_entropy(logits, targets, jnp.ones(7))
    assert_close(errors_again(logits, targets, found.top, found.total), found.errors, 1e-14)

    def part(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = cross_entropy_of_parts(logits, targets, jnp.ones(7))
        return found.errors, errors_again(logits, local_ids(targets, 4), found.top, found.total)

    once, again = jax.vmap(part, axis_name=AXIS)(logits.reshape(7, 3, 4).swapaxes(0, 1))
    assert_close(again, once, 1e-14)
