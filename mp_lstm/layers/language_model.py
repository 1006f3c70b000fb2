"""The deep LSTM language model: embedding, LSTM layers with dropout between, decoder.

    tokens -> embed -> [dropout -> lstm 1] -> ... -> [dropout -> lstm L -> dropout] -> head

Brackets are placement rows. Dropout acts on the non-recurrent connections alone (Zaremba et al. 2014,
https://arxiv.org/abs/1409.2329). With all that AWD-LSTM (Merity, Keskar and Socher 2017,
https://arxiv.org/abs/1708.02182) adds to it, the last row is

    [dropout -> weight_drop(lstm L) -> temporal regularisation -> dropout -> activation regularisation]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Layer, residual
from mp_lstm.layers.dropout import dropout as dropout_layer
from mp_lstm.layers.dropout import locked_dropout
from mp_lstm.layers.embedding import embedding
from mp_lstm.layers.heads import softmax_head
from mp_lstm.layers.initialisers import (
    Initialiser,
    default_bias_init,
    default_kernel_init,
    default_recurrent_init,
    forget_biased,
    symmetric_uniform,
)
from mp_lstm.layers.lstm import lstm_layer
from mp_lstm.layers.model import Model, Tie, row
from mp_lstm.layers.regularisation import activation_regularisation, temporal_regularisation
from mp_lstm.layers.two_biases import two_biases
from mp_lstm.layers.weight_drop import weight_drop as weight_drop_layer
from mp_lstm.planning.checks import positive, shown, whole, within


def language_model(
    *,
    vocab: SupportsIndex,
    embed: SupportsIndex,
    hidden: SupportsIndex | Sequence[SupportsIndex],
    layers: SupportsIndex,
    dropout: float = 0.0,
    dropout_input: float | None = None,
    dropout_output: float | None = None,
    dropout_words: float = 0.0,
    dropout_locked: bool = False,
    weight_drop: float = 0.0,
    activation_reg: float = 0.0,
    temporal_reg: float = 0.0,
    tie: bool = False,
    residual_from: SupportsIndex | None = None,
    init_scale: float | Sequence[float] | None = None,
    kernel_init: Initialiser | Sequence[Initialiser] | None = None,
    recurrent_init: Initialiser | Sequence[Initialiser] | None = None,
    forget_bias: float = 0.0,
    biases: int = 1,
    unroll: int = 1,
    products: DTypeLike | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> Model:
    """A deep LSTM language model.

    Args:
      vocab: number V of tokens.
      embed: size of the token vectors.
      hidden: size of every LSTM layer, or one size a layer.
      layers: number L of LSTM layers.
      dropout: rate on the connections into every LSTM layer and out of the last.
      dropout_input, dropout_output: rate into the first layer and out of the last; None: as `dropout`.
      dropout_words: rate of words whose vector is zero for a whole batch (`embedding`).
      dropout_locked: one mask for all steps of a row in a batch (`locked_dropout`), instead of one a step.
      weight_drop: rate of recurrent weights that are zero for a whole batch (`weight_drop`).
      activation_reg: factor of the mean square of the last layer's output, dropout applied, in what is minimised.
      temporal_reg: factor of the mean square of what the last layer's output, before dropout, moves in a step.
      tie: the decoder's kernel is the embedding's table; needs the last hidden size to equal `embed`.
      residual_from: LSTM layers from this one on (counted from 1) add their input to their output where sizes agree.
      init_scale: draw all weights from uniform(-init_scale, init_scale), or one number for each of embedding, LSTM
        layers and head (a tied head has none); None: Glorot and orthogonal ones.
      kernel_init, recurrent_init: initialisers `(key, shape, dtype) -> array` of the LSTM layers' kernels, one or one a
        layer; None: as `init_scale` says.
      forget_bias: initial bias of the forget gates.
      biases: of an LSTM layer, 1, or 2 as in the papers' code and in PyTorch (`two_biases`).
      unroll: steps of each scan written out at once.
      products: type to which the operands of matrix products are rounded, such as jnp.bfloat16; None: as they are.
      dtype: type of parameters and state.
      implementation: of the LSTM layers, "auto", "xla" or "cudnn" (`lstm_layer`).

    Returns:
      The model: rows "embed", "lstm 1" ... "lstm L", "head".

    Raises:
      InputError: sizes, rates, factors, types or numbers of initialisers that are out of range or do not fit.

    Example:
      >>> import mp_lstm
      >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=2, dropout=0.5)
      >>> [row.name for row in model.rows]
      ['embed', 'lstm 1', 'lstm 2', 'head']
    """
    vocab, embed, layers = positive("vocab", vocab), positive("embed", embed), positive("layers", layers)
    sizes = _sizes(hidden, layers)
    if tie and sizes[-1] != embed:
        raise InputError(
            f"tie: the last hidden size is {sizes[-1]} and embed is {embed}: a tied decoder needs them equal"
        )
    first_residual = layers + 1 if residual_from is None else whole(residual_from)
    if first_residual is None or (residual_from is not None and not 1 <= first_residual <= layers):
        raise InputError(f"residual_from is {shown(residual_from)}, a layer from 1 to {layers} is wanted")
    if biases not in (1, 2):
        raise InputError(f"biases is {biases!r}, 1 or 2 is wanted")
    forget_bias = within("forget_bias", forget_bias, "a finite number")
    of_embedding, *of_layers, of_head = _uniforms(init_scale, layers, tie)
    kernels = _one_a_layer("kernel_init", kernel_init, layers)
    recurrents = _one_a_layer("recurrent_init", recurrent_init, layers)
    drop = locked_dropout if dropout_locked else dropout_layer
    rates = [dropout if dropout_input is None else dropout_input, *[dropout] * (layers - 1)]
    moved = _where(temporal_reg, lambda factor: temporal_regularisation(sizes[-1], factor, dtype=dtype))
    after = [
        *_where(dropout if dropout_output is None else dropout_output, drop),
        *_where(activation_reg, activation_regularisation),
    ]
    shared: dict[str, Any] = {"products": products, "dtype": dtype}

    own_init: dict[str, Any] = {} if of_embedding is None else {"init": of_embedding}
    rows = [embedding(vocab, embed, dropout=dropout_words, dtype=dtype, **own_init)]
    for i, (inputs, size) in enumerate(zip([embed, *sizes[:-1]], sizes, strict=True)):
        layer = lstm_layer(
            inputs,
            size,
            name=f"lstm {i + 1}",
            kernel_init=kernels[i] or of_layers[i] or default_kernel_init,
            recurrent_init=recurrents[i] or of_layers[i] or default_recurrent_init,
            bias_init=forget_biased(size, forget_bias / biases, of_layers[i] or default_bias_init),
            unroll=unroll,
            implementation=implementation,
            **shared,
        )
        layer = two_biases(layer) if biases == 2 else layer
        layer = weight_drop_layer(layer, weight_drop) if weight_drop else layer
        skip = i + 1 >= first_residual and inputs == size
        last = i + 1 == layers
        inner = [*_where(rates[i], drop), layer, *(moved if last else [])]
        rows.append(row([*([residual(row(inner))] if skip else inner), *(after if last else [])]))

    own_init = {} if of_head is None else {"kernel_init": of_head}
    rows.append(softmax_head(sizes[-1], vocab, tied=tie, **own_init, **shared))
    return Model(tuple(rows), (Tie(owner=0, borrower=layers + 1),) if tie else ())


def _sizes(hidden: Any, layers: int) -> list[int]:
    """One hidden size a layer."""
    if not _is_sequence(hidden):
        hidden = [hidden] * layers
    if len(hidden) != layers:
        raise InputError(
            f"hidden gives {len(hidden)} sizes, the model has {layers} layers: give one size a layer, or one number"
        )
    return [positive(f"lstm {i + 1}: hidden", size) for i, size in enumerate(hidden)]


def _is_sequence(value: Any) -> bool:
    """Whether it is several values rather than one, be it a wrong one."""
    return (
        isinstance(value, Sequence | np.ndarray | jax.Array)
        and not isinstance(value, str)
        and getattr(value, "ndim", 1) > 0
    )


def _uniforms(init_scale: Any, layers: int, tie: bool) -> list[Initialiser | None]:
    """One initialiser a row, None where it is not `init_scale` that says."""
    wanted = layers + (1 if tie else 2)
    if init_scale is None:
        return [None] * (layers + 2)
    if not _is_sequence(init_scale):
        return [symmetric_uniform(init_scale)] * (layers + 2)
    if len(init_scale) != wanted:
        head = "" if tie else " and the head"
        raise InputError(
            f"init_scale gives {len(init_scale)} numbers, {wanted} are wanted: one each for the embedding, the "
            f"{layers} LSTM layers{head}, or one for all"
        )
    return [symmetric_uniform(scale) for scale in init_scale] + ([None] if tie else [])


def _one_a_layer(
    name: str, given: Initialiser | Sequence[Initialiser] | None, layers: int
) -> Sequence[Initialiser | None]:
    """One initialiser a layer, None where none is given."""
    if given is None or callable(given):
        return [given] * layers
    if len(given) != layers:
        raise InputError(
            f"{name} gives {len(given)} initialisers, the model has {layers} layers: give one a layer, or one for all"
        )
    return given


def _where(rate: float, make: Callable[[float], Layer]) -> list[Layer]:
    """The layer of a rate, none where it is zero."""
    return [make(rate)] if rate else []
