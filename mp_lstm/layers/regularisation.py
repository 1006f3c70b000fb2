"""Regularisation of activations: layers that hand their input on and add to the gradient.

    alpha * sum over real steps of mean over H of h_t^2                    activation regularisation
    beta  * sum over real steps but a row's first of mean (h_t - h_t-1)^2  temporal activation regularisation

Such a term belongs to the loss, a sum over tokens that is divided once by their number, so each is one per token too.
The papers' code divides the second by T - 1 instead of T. The loss that is reported stays the negative log-likelihood,
of which a perplexity can be made; the gradient is that of loss and terms.

    F   y = x, state = the last real x (of the temporal term: the next chunk's first difference needs it)
    B   dx = dy + scale d(term)/dx, dstate likewise       scale: the gradient of what is minimised by the loss's sum

Terms act while training alone, and padding adds nothing to them. Weights are the loss's: a term counts each real step
as one, and is divided by what a batch's weights amount to, as the loss is. A difference lies within a batch: what state
was carried into it plays no part.

References:
  Merity, McCann and Socher 2017, https://arxiv.org/abs/1708.01009
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from mp_lstm.layers.arguments import check_types, checked_sizes
from mp_lstm.layers.base import Context, Layer, State, apply, mask_steps
from mp_lstm.planning.checks import within
from mp_lstm.planning.costs import Cost


def activation_regularisation(factor: float, *, name: str = "activation regularisation") -> Layer:
    """Adds to each token's loss `factor` times the mean square of the layer's input [T, B, H].

    Args:
      factor: the papers' alpha, at least 0.
      name: for tables and messages.

    Returns:
      The layer: y is x, and only the gradient changes.

    Raises:
      InputError: the factor is negative, or no number that float32 holds.

    Example:
      >>> import jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> layer, ctx = mp_lstm.activation_regularisation(2.0), Context(train=True)
      >>> x = jnp.array([[[3.0, 0.0]]])
      >>> _, y, saved = layer.forward((), x, (), ctx)
      >>> layer.backward((), saved, jnp.zeros_like(y), (), ctx)[0].tolist()
      [[[6.0, 0.0]]]
    """

    def term(x: Array, state: tuple[()], ctx: Context) -> tuple[tuple[()], Array]:
        return state, jnp.square(mask_steps(ctx.mask, x)).mean(axis=-1).sum()

    return _adding(factor, term, lambda batch_size: (), name)


def temporal_regularisation(
    size: SupportsIndex, factor: float, *, name: str = "temporal regularisation", dtype: DTypeLike = jnp.float32
) -> Layer:
    """Adds to each token's loss `factor` times the mean square of what the layer's input [T, B, H] moved in a step.

    Args:
      size: H of the input.
      factor: the papers' beta, at least 0.
      name: for tables and messages.
      dtype: type of the input.

    Returns:
      The layer: y is x, and only the gradient changes. Its state is the last real x of each row.

    Raises:
      InputError: the size is no positive whole number, the factor negative or no number that float32 holds, or the type
        no floating one.

    Example:
      >>> import jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> layer, ctx = mp_lstm.temporal_regularisation(1, 2.0), Context(train=True)
      >>> x, before = jnp.array([[[3.0]], [[4.0]]]), layer.init_state(1)
      >>> _, y, saved = layer.forward((), x, before, ctx)
      >>> layer.backward((), saved, jnp.zeros_like(y), before, ctx)[0].ravel().tolist()
      [-4.0, 4.0]
    """
    (size,) = checked_sizes(name, size=size)
    check_types(name, dtype=dtype)

    def term(x: Array, before: Float[Array, "B H"], ctx: Context) -> tuple[Array, Array]:
        known = jnp.concatenate([before[None], x])
        time, rows, _ = x.shape
        has_one_before = (ctx.start + jnp.arange(time) > 0)[:, None, None]
        moved = mask_steps(ctx.mask, jnp.where(has_one_before, known[1:] - known[:-1], jnp.zeros((), x.dtype)))
        steps = jnp.full((rows,), time) if ctx.mask is None else ctx.mask.sum(axis=0)
        last = jnp.take_along_axis(known, steps[None, :, None], axis=0)[0]
        return last, jnp.square(moved).mean(axis=-1).sum()

    return _adding(factor, term, lambda batch_size: jnp.zeros((batch_size, size), dtype), name)


def _adding(
    factor: Any, term: Callable[..., tuple[State, Array]], init_state: Callable[[int], State], name: str
) -> Layer:
    """The layer that adds factor times term(x, state, ctx) -> (state, term) to what is minimised."""
    factor = within(f"{name}: the factor", factor, "a finite number of at least 0", least=0.0)

    def forward(params: tuple[()], x: Array, state: State, ctx: Context) -> tuple[State, Array, Any]:
        if not ctx.train:
            return state, x, (x, state)
        return term(x, state, ctx)[0], x, (x, state)

    def backward(
        params: tuple[()], saved: Any, dy: Array, dstate: State, ctx: Context
    ) -> tuple[Array, State, tuple[()]]:
        if not ctx.train:
            return dy, dstate, ()
        _, pull = jax.vjp(lambda x, state: term(x, state, ctx), *saved)
        dx, dstate = pull((dstate, jnp.asarray(factor * ctx.scale, dy.dtype)))
        return dy + dx, dstate, ()

    by_hand = Layer(
        name=name,
        kind="regularisation",
        init=lambda key: (),
        init_state=init_state,
        forward=forward,
        backward=backward,
        weight_gradient=lambda params, tape, ctx: (),
        infer=lambda params, x, state, ctx: (state, x),
        cost=lambda batch_size, time: Cost(0, 0, 0, 0, 0, 0, 0),
    )

    # The derivative of F, where JAX takes it, must be B: that of the identity would leave the term out.
    def differentiable(params: tuple[()], x: Array, state: State, ctx: Context) -> tuple[State, Array, Any]:
        return *apply(by_hand, params, x, state, ctx), (x, state)

    return by_hand._replace(forward=differentiable)
