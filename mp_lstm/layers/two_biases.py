"""Two biases, as an LSTM has them in the papers' code, in cuDNN and in PyTorch: one beside x K, one beside h R.

The two are added before anything else happens to them, so their gradients are equal and they train as one that learns
twice as fast; in the global norm their gradient counts twice. One number does the same, kept smaller by sqrt(2):

    bias = first + second = sqrt(2) b        d b = sqrt(2) d bias        |d b|^2 = |d first|^2 + |d second|^2

With SGD, momentum and clipping that is exact. It is not with optimizers that scale a gradient by its size (Adam).
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jaxtyping import Array, Key

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, Layer, Params, Saved, State, Tape

SCALE = math.sqrt(2.0)


def two_biases(layer: Layer) -> Layer:
    """Trains the bias of an LSTM layer as the sum of two, each drawn and trained as the layer's own would be.

    Args:
      layer: an `lstm_layer`, or another with a `bias` among its parameters.

    Returns:
      The layer; the bias among its parameters is the sum of the two, divided by sqrt(2).

    Raises:
      InputError: the layer has no bias.

    References:
      The code of Zaremba et al. 2014, https://arxiv.org/abs/1409.2329, which has a bias in each of its two linear maps

    Example:
      >>> import jax, mp_lstm
      >>> layer = mp_lstm.two_biases(mp_lstm.lstm_layer(3, 5, bias_init=jax.nn.initializers.ones))
      >>> round(float(layer.init(jax.random.key(0)).bias[0]), 3)
      1.414
    """
    shapes = jax.eval_shape(layer.init, jax.random.key(0))
    if "bias" not in getattr(shapes, "_fields", ()):
        raise InputError(f"two_biases: {layer.name} has no bias among its parameters: wrap an lstm_layer")

    def scaled(params: Any) -> Any:
        return params._replace(bias=params.bias * SCALE)

    def init(key: Key[Array, ""]) -> Params:
        first, second = layer.init(key), layer.init(jax.random.fold_in(key, 1))
        return first._replace(bias=(first.bias + second.bias) / SCALE)

    def forward(params: Params, x: Array, state: State, ctx: Context) -> tuple[State, Array, Saved]:
        return layer.forward(scaled(params), x, state, ctx)

    def backward(params: Params, saved: Saved, dy: Array, dstate: State, ctx: Context) -> tuple[Any, State, Tape]:
        return layer.backward(scaled(params), saved, dy, dstate, ctx)

    def weight_gradient(params: Params, tape: Tape, ctx: Context) -> Params:
        return scaled(layer.weight_gradient(scaled(params), tape, ctx))

    def infer(params: Params, x: Array, state: State, ctx: Context) -> tuple[State, Array]:
        return layer.infer(scaled(params), x, state, ctx)

    phases: dict[str, Any] = {"forward": forward, "backward": backward, "weight_gradient": weight_gradient}
    return layer._replace(init=init, infer=infer, lean=None if layer.lean is None else two_biases(layer.lean), **phases)
