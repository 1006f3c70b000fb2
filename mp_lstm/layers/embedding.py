"""Embedding: a table looked up by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Key

from mp_lstm.layers.base import Context, Layer, infer_by_forward
from mp_lstm.layers.lstm import check_sizes
from mp_lstm.planning.costs import Cost


class EmbeddingParams(NamedTuple):
    """One vector a token."""

    table: Float[Array, "V D"]


class Tape(NamedTuple):
    """Tokens and the gradients of their vectors."""

    tokens: Int[Array, "T B"]
    dy: Float[Array, "T B D"]


def embedding(
    vocab: int,
    size: int,
    *,
    name: str = "embed",
    init: Any = jax.nn.initializers.normal(0.1),
    dtype: DTypeLike = jnp.float32,
) -> Layer:
    """Looks up a vector for each token.

    Args:
      vocab: number V of tokens.
      size: size D of a vector.
      name: for tables and messages.
      init: initialiser `(key, shape, dtype) -> table`.
      dtype: type of the table.

    Returns:
      The layer: tokens [T, B] in 0..V-1 -> y [T, B, D].

    Raises:
      InputError: a size is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> layer = mp_lstm.embedding(10, 4)
      >>> layer.infer(layer.init(jax.random.key(0)), jnp.zeros((3, 2), int), (), Context())[1].shape
      (3, 2, 4)
    """
    check_sizes(name, vocab=vocab, size=size)
    itemsize = jnp.dtype(dtype).itemsize

    def forward(params: EmbeddingParams, x: Array, state: tuple[()], ctx: Context) -> Any:
        return state, params.table[x], x

    def backward(params: EmbeddingParams, saved: Array, dy: Array, dstate: tuple[()], ctx: Context) -> Any:
        return None, dstate, Tape(saved, dy)

    def weight_gradient(params: EmbeddingParams, tape: Tape, ctx: Context) -> EmbeddingParams:
        return EmbeddingParams(jnp.zeros((vocab, size), dtype).at[tape.tokens].add(tape.dy))

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
        infer=infer_by_forward(forward),
        cost=cost,
        input_ids=vocab,
    )
