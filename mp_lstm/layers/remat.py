"""Rematerialisation: less memory for more work. F saves its input and state alone, B runs F again.

    none     F saves all that B reads                              B
    head     the same, but rows run their lean variants            B
    layer    F saves the input and state of each placement row     B of a row: F again, then B
    stage    F saves the input of the stage and its rows' states   B: F of all rows again, then B of all

A lean variant (`Layer.lean`) is a layer's own way to keep less, as the softmax head has one; a row that has it needs no
other with "layer", and runs it inside the chain with "stage".

Otherwise it is a function from layer to layer, so a stage's chain and each of its rows take it alike. Gradients do not
change: a dropout mask is a function of the unit's context, so F draws it again as it was.

References:
  Chen et al. 2016, https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context, Layer, Params, State, Tape, chain, leaner

REMAT = ("none", "head", "layer", "stage")


class Saved(NamedTuple):
    """All that is kept of F."""

    x: Any
    state: State


def rematerialised(layer: Layer) -> Layer:
    """The same layer, B of which computes again what F would have saved.

    Args:
      layer: any layer, a chain too.

    Returns:
      The layer: B takes the time of F more, and what F saves is its input and state.

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context
      >>> from mp_lstm.layers.remat import rematerialised
      >>> layer = rematerialised(mp_lstm.lstm_layer(3, 5))
      >>> params, state = layer.init(jax.random.key(0)), layer.init_state(2)
      >>> _, _, saved = layer.forward(params, jnp.ones((4, 2, 3)), state, Context())
      >>> [leaf.shape for leaf in jax.tree.leaves(saved)]
      [(4, 2, 3), (2, 5), (2, 5)]
    """

    def forward(params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any, Saved]:
        after, y, _ = layer.forward(params, x, state, ctx)
        return after, y, Saved(x, state)

    def backward(params: Params, saved: Saved, dy: Any, dstate: State, ctx: Context) -> tuple[Any, State, Tape]:
        x = _after(dy, saved.x)
        _, _, kept = layer.forward(params, x, saved.state, ctx)
        dx, dstate, tape = layer.backward(params, kept, dy, dstate, ctx)
        return dx, dstate, _restored(saved.x, x, tape)

    return layer._replace(forward=forward, backward=backward, lean=None)


def _after(first: Any, x: Any) -> Any:
    """x, but not before `first` is computed.

    A compiler would otherwise run F of all rows of a stage before B of the last, and hold at once what each of them
    saves. A barrier does not keep it from that: XLA drops those for CPUs before it orders operations. So each leaf
    depends on a number that is always zero: no value is above infinity.
    """
    leaf = jax.tree.leaves(first)[0]
    zero = leaf[(0,) * leaf.ndim] > jnp.inf
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), x)


def _restored(originals: Any, copies: Any, tree: Any) -> Any:
    """The tree with originals in the place of their copies: a program need not return what it was given."""
    known = {id(copy): leaf for copy, leaf in zip(jax.tree.leaves(copies), jax.tree.leaves(originals), strict=True)}
    return jax.tree.map(lambda leaf: known.get(id(leaf), leaf), tree)


def chain_with(remat: str, layers: Sequence[Layer], *, first: int = 0) -> Layer:
    """The chain of a stage's rows, with as much rematerialisation as a plan says.

    Args:
      remat: "none", "head" (lean variants), "layer" (each row) or "stage" (the chain as one).
      layers, first: as `chain` takes them.

    Raises:
      InputError: remat is something else.

    Example:
      >>> import mp_lstm
      >>> from mp_lstm.layers.remat import chain_with
      >>> chain_with("layer", [mp_lstm.dense(3, 5), mp_lstm.dense(5, 2)]).join
      ('time', 'time')
    """
    if remat not in REMAT:
        raise InputError(f"remat is {remat!r}, one of {', '.join(REMAT)} is wanted")
    if remat == "layer":
        layers = [rematerialised(layer) if layer.lean is None else layer.lean for layer in layers]
    elif remat != "none":
        layers = list(map(leaner, layers))
    whole = chain(layers, first=first)
    return rematerialised(whole) if remat == "stage" else whole
