"""Embedding: a table looked up by token."""

from __future__ import annotations

from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Key

from mp_lstm.layers.arguments import check_types, checked_sizes
from mp_lstm.layers.base import Context, Layer
from mp_lstm.layers.dropout import checked_rate, keep_mask, kept_and_scaled, training_key
from mp_lstm.layers.vocabulary import local_ids, sum_of_parts
from mp_lstm.planning.costs import Cost


class EmbeddingParams(NamedTuple):
    """One vector a token."""

    table: Float[Array, "V D"]


class Saved(NamedTuple):
    """What F keeps for B: tokens, and where their words are kept (None: all are)."""

    tokens: Int[Array, "T B"]
    kept: Bool[Array, "T B 1"] | None


class Tape(NamedTuple):
    """Tokens and the gradients of their vectors."""

    tokens: Int[Array, "T B"]
    dy: Float[Array, "T B D"]


def embedding(
    vocab: SupportsIndex,
    size: SupportsIndex,
    *,
    dropout: float = 0.0,
    name: str = "embed",
    init: Any = jax.nn.initializers.normal(0.1),
    dtype: DTypeLike = jnp.float32,
) -> Layer:
    """Looks up a vector for each token.

    Args:
      vocab: number V of tokens.
      size: size D of a vector.
      dropout: rate of words whose vector is zero for a whole batch while training; the others' are scaled. It acts on
        the look-up alone: a decoder that borrows the table has all of it.
      name: for tables and messages.
      init: initialiser `(key, shape, dtype) -> table`.
      dtype: type of the table.

    Returns:
      The layer: tokens [T, B] in 0..V-1 -> y [T, B, D].

    Raises:
      InputError: a size is no positive whole number, the rate is out of range, or the type no floating one.

    References:
      Dropout of words: Gal and Ghahramani 2016, https://arxiv.org/abs/1512.05287, section 4.2

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> layer = mp_lstm.embedding(10, 4)
      >>> layer.infer(layer.init(jax.random.key(0)), jnp.zeros((3, 2), int), (), Context())[1].shape
      (3, 2, 4)
    """
    vocab, size = checked_sizes(name, vocab=vocab, size=size)
    check_types(name, dtype=dtype)
    dropout = checked_rate(name, dropout)
    itemsize = jnp.dtype(dtype).itemsize

    def kept(tokens: Array, ctx: Context) -> Array | None:
        """Where the word is kept. The mask is that of the whole vocabulary, whichever tokens a unit holds."""
        if not ctx.train or dropout == 0.0:
            return None
        words = keep_mask(training_key(name, ctx), ctx.counter, 0, 0, (1, 1, vocab), dropout)[0, 0]
        return words[tokens][:, :, None]

    def look_up(table: Array, tokens: Array) -> Array:
        size, _ = table.shape
        if size == vocab:
            return table[tokens]
        return sum_of_parts(table.at[local_ids(tokens, size)].get(mode="fill", fill_value=0))

    def forward(params: EmbeddingParams, x: Array, state: tuple[()], ctx: Context) -> Any:
        y, mask = look_up(params.table, x), kept(x, ctx)
        return state, y if mask is None else kept_and_scaled(y, mask, dropout), Saved(x, mask)

    def backward(params: EmbeddingParams, saved: Saved, dy: Array, dstate: tuple[()], ctx: Context) -> Any:
        dy = dy if saved.kept is None else kept_and_scaled(dy, saved.kept, dropout)
        return None, dstate, Tape(saved.tokens, dy)

    def weight_gradient(params: EmbeddingParams, tape: Tape, ctx: Context) -> EmbeddingParams:
        rows, _ = params.table.shape
        tokens = tape.tokens if rows == vocab else local_ids(tape.tokens, rows)
        return EmbeddingParams(jnp.zeros((rows, size), dtype).at[tokens].add(tape.dy))

    def cost(batch_size: int, time: int) -> Cost:
        rows = batch_size * time
        return Cost(
            forward=rows * size,
            backward=0,
            weight=vocab * size + rows * size,
            parameters=vocab * size,
            parameter_bytes=rows * size * itemsize,  # a look-up reads these rows alone
            saved_bytes=0,
            transfer_bytes=rows * size * itemsize,
            tape_bytes=rows * size * itemsize,  # dy
            input_bytes=rows * 4,
        )

    def draw(key: Key[Array, ""]) -> EmbeddingParams:
        return EmbeddingParams(init(key, (vocab, size), dtype))

    return Layer(
        name=name,
        kind="embedding",
        init=draw,
        init_state=lambda batch_size: (),
        forward=forward,
        backward=backward,
        weight_gradient=weight_gradient,
        infer=lambda params, x, state, ctx: (state, params.table[x]),
        cost=cost,
        input_ids=vocab,
    )
