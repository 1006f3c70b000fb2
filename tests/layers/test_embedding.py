"""The embedding: rows of a table, and their gradients added up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context
from mp_lstm.layers.dropout import keep_probability


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


def kept_words(layer: mp_lstm.Layer, tokens: jax.Array, **place: int) -> np.ndarray:
    """Which tokens of a unit still have their vector of ones."""
    vocab, size = layer.input_ids or 0, 2
    ctx = Context(key=jax.random.key(0), train=True, **{"counter": 7} | place)
    params = mp_lstm.EmbeddingParams(jnp.ones((vocab, size)))
    _, y, saved = layer.forward(params, tokens, (), ctx)
    kept = np.asarray(y[:, :, 0] != 0)
    np.testing.assert_allclose(y, np.where(kept[:, :, None], 1 / keep_probability(0.2), 0) * np.ones(size), rtol=1e-6)
    _, _, tape = layer.backward(params, saved, jnp.ones_like(y), (), ctx)
    np.testing.assert_allclose(tape.dy, y)
    return kept


def test_a_dropped_word_is_dropped_at_all_its_places_in_a_batch() -> None:
    """Of 4,000 words as many as stated; the same in every unit of a batch, others in the next batch."""
    layer = mp_lstm.embedding(4000, 2, dropout=0.2)
    every = jnp.arange(4000).reshape((40, 100))
    kept = kept_words(layer, every)
    assert abs(kept.mean() - 0.8) < 5 * np.sqrt(0.2 * 0.8 / 4000)
    tokens = jax.random.randint(jax.random.key(1), (6, 5), 0, 4000).at[2:].set(3999)
    again = kept_words(layer, tokens, start=12, row=3)
    assert (again == kept.ravel()[np.asarray(tokens)]).all()
    assert (kept_words(layer, every, counter=8) != kept).any()


def test_words_are_whole_outside_training() -> None:
    layer = mp_lstm.embedding(4, 2, dropout=0.9)
    params, tokens = layer.init(jax.random.key(0)), jnp.array([[3], [0]])
    for ctx in (Context(), Context(key=jax.random.key(0))):
        assert (layer.forward(params, tokens, (), ctx)[1] == params.table[tokens]).all()
    assert (
        layer.infer(params, tokens, (), Context(key=jax.random.key(0), train=True))[1] == params.table[tokens]
    ).all()


def test_refuses_a_rate_that_is_none_and_training_without_a_key() -> None:
    with pytest.raises(InputError, match=r"embed: the rate is 1\.5, a number in \[0, 1\) is wanted"):
        mp_lstm.embedding(4, 2, dropout=1.5)
    layer = mp_lstm.embedding(4, 2, dropout=0.5)
    with pytest.raises(InputError, match=r"embed: training with dropout needs a key"):
        layer.forward(layer.init(jax.random.key(0)), jnp.array([[3]]), (), Context(train=True))


@pytest.mark.parametrize(("sizes", "message"), [((0, 2), "vocab is 0"), ((4, -1), "size is -1")])
def test_refuses_sizes_that_are_none(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=f"words: {message}, wanted at least 1: pass a positive number"):
        mp_lstm.embedding(*sizes, name="words")
