"""The cross-entropy of logits: numbers that overflow a naive softmax, and errors that are found a second time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mp_lstm.layers import decoder
from mp_lstm.layers.base import Borrowed
from mp_lstm.layers.decoder import cross_entropy, cross_entropy_of_parts, errors_again
from mp_lstm.layers.embedding import EmbeddingParams
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


@pytest.mark.parametrize("what", ["logits", "input gradient"])
def test_a_rounded_table_is_multiplied_where_it_lies(what: str) -> None:
    """Its transpose was laid out anew for every chunk, which took longer than the product."""
    rows, inputs, vocab = 24, 40, 56
    table = jax.random.normal(jax.random.key(0), (vocab, inputs))
    tied = Borrowed(decoder.TiedHeadParams(jnp.zeros(vocab)), EmbeddingParams(table))
    plain = decoder.HeadParams(table.T, jnp.zeros(vocab))
    x = jax.random.normal(jax.random.key(1), (rows, inputs if what == "logits" else vocab))

    def of(params: Any, x: jax.Array) -> jax.Array:
        if what == "logits":
            return decoder.logits_of(params, x, jnp.bfloat16)
        return decoder.input_gradient(params, x, jnp.bfloat16, jnp.float32)

    given = decoder.rounded(tied, jnp.bfloat16)
    assert "transpose" not in {eqn.primitive.name for eqn in jax.make_jaxpr(of)(given, x).eqns}
    found, wanted = of(given, x), of(decoder.rounded(plain, jnp.bfloat16), x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
