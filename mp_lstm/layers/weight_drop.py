"""Weight drop: dropout of an LSTM's recurrent weights, one mask for a whole batch.

The layer inside sees other parameters and knows nothing of it; what it would round ahead of its products is rounded
behind the mask, and so in every unit. The mask acts outside the scan, once a unit; F, B and W
draw it anew, as keeping a masked kernel for every unit would cost more than drawing it.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, Layer, Params, Saved, State, Tape
from mp_lstm.layers.dropout import checked_rate, keep_mask, kept_and_scaled, training_key
from mp_lstm.planning.costs import Cost

DRAW_FLOPS = 30.0
"""Operations that a weight's mask costs: twenty rounds of the cipher for four weights."""


def weight_drop(layer: Layer, rate: float) -> Layer:
    """Drops recurrent weights of an LSTM layer for a whole batch, with probability `rate` while training.

    The mask is a function of (key, batch counter, place of the layer): the same for every step, row, chunk and
    micro-batch of a batch. The weights that are kept are scaled; predictions and evaluation use all of them.

    Args:
      layer: an `lstm_layer`, or another with a `recurrent_kernel` [H, ...] among its parameters, H below 65,536.
      rate: probability of dropping a weight, in [0, 1), at most `dropout.MOST_RATE`.

    Returns:
      The layer, its parameters as they were.

    Raises:
      InputError: the rate is out of range, or the layer has no recurrent kernel.

    References:
      DropConnect: Wan et al. 2013, https://proceedings.mlr.press/v28/wan13.html; on recurrent weights: Merity, Keskar
      and Socher 2017, https://arxiv.org/abs/1708.02182

    Example:
      >>> import mp_lstm
      >>> layer = mp_lstm.weight_drop(mp_lstm.lstm_layer(3, 5), 0.5)
      >>> layer.name, layer.cost(batch_size=2, time=4).parameters
      ('lstm', 180)
    """
    rate = checked_rate(f"weight_drop of {layer.name}", rate)
    shapes = jax.eval_shape(layer.init, jax.random.key(0))
    if "recurrent_kernel" not in getattr(shapes, "_fields", ()):
        raise InputError(f"weight_drop: {layer.name} has no recurrent_kernel among its parameters: wrap an lstm_layer")
    size = shapes.recurrent_kernel.size

    def dropped(params: Any, ctx: Context) -> Any:
        """Parameters, or their gradients, with the mask on the recurrent kernel."""
        if not ctx.train or rate == 0.0:
            return params
        kernel = params.recurrent_kernel
        rows, columns = kernel.shape
        mask = keep_mask(training_key(layer.name, ctx), ctx.counter, 0, 0, (1, rows, columns), rate)[0]
        return params._replace(recurrent_kernel=kept_and_scaled(kernel, mask, rate))

    def forward(params: Params, x: Array, state: State, ctx: Context) -> tuple[State, Array, Saved]:
        return layer.forward(dropped(params, ctx), x, state, ctx)

    def backward(params: Params, saved: Saved, dy: Array, dstate: State, ctx: Context) -> tuple[Any, State, Tape]:
        return layer.backward(dropped(params, ctx), saved, dy, dstate, ctx)

    def weight_gradient(params: Params, tape: Tape, ctx: Context) -> Params:
        return dropped(layer.weight_gradient(dropped(params, ctx), tape, ctx), ctx)

    def cost(batch_size: int, time: int) -> Cost:
        plain, draw = layer.cost(batch_size, time), DRAW_FLOPS * size if rate else 0.0
        forward, backward, weight = (flops + draw for flops in (plain.forward, plain.backward, plain.weight))
        return plain._replace(forward=forward, backward=backward, weight=weight, prepared_bytes=0)

    return layer._replace(
        forward=forward,
        backward=backward,
        weight_gradient=weight_gradient,
        cost=cost,
        prepare=None,
        lean=None if layer.lean is None else weight_drop(layer.lean, rate),
    )
