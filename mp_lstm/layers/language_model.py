"""The deep LSTM language model: embedding, LSTM layers with dropout between, decoder.

    tokens -> embed -> [dropout -> lstm 1] -> ... -> [dropout -> lstm L -> dropout] -> head

Brackets are placement rows. Dropout acts on the non-recurrent connections alone (Zaremba et al. 2014,
https://arxiv.org/abs/1409.2329).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Layer, residual
from mp_lstm.layers.dropout import dropout as dropout_layer
from mp_lstm.layers.embedding import embedding
from mp_lstm.layers.heads import softmax_head
from mp_lstm.layers.lstm import default_bias_init, default_kernel_init, default_recurrent_init, lstm_layer
from mp_lstm.layers.model import Model, Tie, row


def language_model(
    *,
    vocab: int,
    embed: int,
    hidden: int | Sequence[int],
    layers: int,
    dropout: float = 0.0,
    tie: bool = False,
    residual_from: int | None = None,
    init_scale: float | None = None,
    forget_bias: float = 0.0,
    unroll: int = 1,
    products: DTypeLike | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Model:
    """A deep LSTM language model.

    Args:
      vocab: number V of tokens.
      embed: size of the token vectors.
      hidden: size of every LSTM layer, or one size a layer.
      layers: number L of LSTM layers.
      dropout: rate on the connections into every LSTM layer and out of the last.
      tie: the decoder's kernel is the embedding's table; needs the last hidden size to equal `embed`.
      residual_from: LSTM layers from this one on (counted from 1) add their input to their output where sizes agree.
      init_scale: draw all weights from uniform(-init_scale, init_scale); None: Glorot and orthogonal ones.
      forget_bias: initial bias of the forget gates.
      unroll: steps of each scan written out at once.
      products: type to which the operands of matrix products are rounded, such as jnp.bfloat16; None: as they are.
      dtype: type of parameters and state.

    Returns:
      The model: rows "embed", "lstm 1" ... "lstm L", "head".

    Raises:
      InputError: sizes that are out of range or do not fit.

    Example:
      >>> import mp_lstm
      >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=2, dropout=0.5)
      >>> [row.name for row in model.rows]
      ['embed', 'lstm 1', 'lstm 2', 'head']
    """
    sizes = _sizes(hidden, layers)
    if tie and sizes[-1] != embed:
        raise InputError(
            f"tie: the last hidden size is {sizes[-1]} and embed is {embed}: a tied decoder needs them equal"
        )
    if residual_from is not None and not 1 <= residual_from <= layers:
        raise InputError(f"residual_from is {residual_from}, a layer from 1 to {layers} is wanted")
    uniform = None if init_scale is None else symmetric_uniform(init_scale)
    shared = {"products": products, "dtype": dtype}
    rows = [embedding(vocab, embed, dtype=dtype, **({} if uniform is None else {"init": uniform}))]
    for i, (inputs, size) in enumerate(zip([embed, *sizes[:-1]], sizes, strict=True)):
        layer = lstm_layer(
            inputs,
            size,
            name=f"lstm {i + 1}",
            kernel_init=uniform or default_kernel_init,
            recurrent_init=uniform or default_recurrent_init,
            bias_init=forget_biased(size, forget_bias, uniform or default_bias_init),
            unroll=unroll,
            **shared,
        )
        skip = residual_from is not None and i + 1 >= residual_from and inputs == size
        rows.append(_lstm_row(layer, dropout, skip=skip, last=i + 1 == layers))
    kernel_init = {} if uniform is None else {"kernel_init": uniform}
    rows.append(softmax_head(sizes[-1], vocab, tied=tie, **kernel_init, **shared))
    return Model(tuple(rows), (Tie(owner=0, borrower=layers + 1),) if tie else ())


def _sizes(hidden: int | Sequence[int], layers: int) -> list[int]:
    """One hidden size a layer."""
    if not isinstance(layers, int) or layers < 1:
        raise InputError(f"layers is {layers!r}, a whole number of at least 1 is wanted")
    if isinstance(hidden, int):
        return [hidden] * layers
    if len(hidden) != layers:
        raise InputError(
            f"hidden gives {len(hidden)} sizes, the model has {layers} layers: give one size a layer, or one number"
        )
    return list(hidden)


def _lstm_row(layer: Layer, rate: float, *, skip: bool, last: bool) -> Layer:
    """An LSTM layer with its dropout and residual connection."""
    inner = row([dropout_layer(rate), layer]) if rate else layer
    inner = residual(inner) if skip else inner
    if not (rate and last):
        return inner
    if skip:
        return row([inner, dropout_layer(rate)])
    return row([dropout_layer(rate), layer, dropout_layer(rate)])


def symmetric_uniform(scale: float) -> Any:
    """Initialiser: uniform(-scale, scale)."""
    if not scale > 0:
        raise InputError(f"init_scale is {scale}, a positive number is wanted")

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return jax.random.uniform(key, shape, dtype, -scale, scale)

    return init


def forget_biased(hidden: int, forget_bias: float, init: Any) -> Any:
    """Initialiser of an LSTM's bias: `init`, plus `forget_bias` for the forget gates."""

    def biased(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return init(key, shape, dtype).at[hidden : 2 * hidden].add(forget_bias)

    return biased
