"""The embedding: rows of a table, and their gradients added up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context


def test_looks_up_and_adds_the_gradients_of_a_token_that_comes_twice() -> None:
    layer = mp_lstm.embedding(4, 2)
    params = mp_lstm.EmbeddingParams(jnp.arange(8.0).reshape((4, 2)))
    tokens = jnp.array([[3, 0], [3, 1]])
    _, y, saved = layer.forward(params, tokens, (), Context())
    assert y.tolist() == [[[6, 7], [0, 1]], [[6, 7], [2, 3]]]
    dx, _, tape = layer.backward(params, saved, jnp.ones_like(y), (), Context())
    assert dx is None
    gradients = layer.weight_gradient(params, tape, Context())
    assert gradients.table.tolist() == [[1, 1], [1, 1], [0, 0], [2, 2]]


def test_the_initialiser_is_used() -> None:
    params = mp_lstm.embedding(4, 2, init=jax.nn.initializers.constant(3)).init(jax.random.key(0))
    assert params.table.tolist() == [[3, 3]] * 4


@pytest.mark.parametrize(("sizes", "message"), [((0, 2), "vocab is 0"), ((4, -1), "size is -1")])
def test_refuses_sizes_that_are_none(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=f"words: {message}, a whole number of at least 1 is wanted"):
        mp_lstm.embedding(*sizes, name="words")
