"""The pure functions of one stage: what is compiled, made from the rows it owns.

    prepare           own, lent                                  -> params, of which F and B make the most
    forward           own, lent, x, state, unit, total           -> state, y, saved
    backward          own, lent, saved, dy, dstate, unit, summed; time  -> dx, dstate, timed tape, summed tape
    weight_gradient   own, lent, timed tapes, summed, unit, so far; time -> gradients (own, lent)
    evaluate          own, lent, x, state, unit, total           -> state, y
    infer             own, lent, x, state, unit                  -> state, y

`own` are the parameters of the stage's rows, `lent` those of ties from other stages; where a layer prepares its
parameters (`Layer.prepare`), what F, B and evaluation are given as `own` are those, and `lent` is None. The last
stage's y is the loss summed over the units so far: `total` goes in and comes out. `time` is static: the steps of the
unit, or of the joined chunks. On a group of devices these functions see a device's part of each array (`partition`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Integer, Key

from mp_lstm.layers.base import (
    Context,
    Layer,
    Params,
    dropout_key,
    join_time,
    merge_tape,
    split_tape,
    steps_mask,
)
from mp_lstm.layers.model import Model, check_loss, lend, reset_rows, settle
from mp_lstm.layers.remat import chain_with
from mp_lstm.layers.sharding import check_parts
from mp_lstm.runtime import optimizer as optimizers
from mp_lstm.runtime.placement import DATA, MODEL, Tree, parts_of, stage_sharding


class Unit(NamedTuple):
    """A unit's place in its batch, and what the loss needs of it (on the last stage).

    Args:
      key: training's key.
      counter: number of the batch.
      start, row: first time step and first batch row, of a device's own rows where several share a micro-batch.
      lengths: [B] real steps of the micro-batch's rows, counted from the batch's first step; None: all.
      targets, weights: of the unit's steps.
    """

    key: Key[Array, ""] | None = None
    counter: Integer[Array, ""] | None = None
    start: Integer[Array, ""] | None = None
    row: Integer[Array, ""] | None = None
    lengths: Integer[Array, " B"] | None = None
    targets: Any = None
    weights: Float[Array, "T B"] | None = None


class Gradients(NamedTuple):
    """Gradients of a stage's own parameters and of what it was lent."""

    own: Params
    lent: tuple[Params, ...]


class Stage(NamedTuple):
    """A stage: which rows, where, and its functions."""

    number: int
    rows: range
    sharding: NamedSharding
    layer: Layer
    is_last: bool
    init: Callable[..., Tree]
    prepare: Callable[..., Tree] | None
    forward: Callable[..., Tree]
    backward: Callable[..., Tree]
    weight_gradient: Callable[..., Tree]
    evaluate: Callable[..., Tree]
    infer: Callable[..., Tree]
    split: Callable[..., Tree]
    update: Callable[..., Tree]


def context(unit: Unit, time: int, *, train: bool) -> Context:
    """The context of a unit of `time` steps."""
    start = jnp.zeros((), jnp.int32) if unit.start is None else unit.start
    return Context(
        key=None if unit.key is None else dropout_key(unit.key),
        counter=0 if unit.counter is None else unit.counter,
        start=start,
        row=0 if unit.row is None else unit.row,
        mask=steps_mask(unit.lengths, start, time),
        targets=unit.targets,
        weights=unit.weights,
        train=train,
    )


def make_stage(
    model: Model,
    index: int,
    rows: range,
    place: Any,
    optimizer: optax.GradientTransformation,
    *,
    max_norm: float | None,
    remat: str = "none",
) -> Stage:
    """Builds stage `index` from consecutive rows of a model, on a device or a group of them."""
    layer = chain_with(remat, model.rows[rows.start : rows.stop], first=rows.start)
    is_last = rows.stop == len(model.rows)
    sharding = stage_sharding(place)
    parts = parts_of(sharding, DATA)
    check_parts(model.rows[rows.start : rows.stop], parts_of(sharding, MODEL))

    def time_of(x: Tree) -> int:
        return jax.tree.leaves(x)[0].shape[0]

    def added(total: Array | None, y: Tree) -> Tree:
        """The loss of the units so far and this one, where y is one."""
        if total is None:
            return y
        check_loss(layer.name, y)
        return total + summed_over_rows(y)

    def summed_over_rows(tree: Tree) -> Tree:
        """Sums of what each device has found for its rows of a micro-batch."""
        return tree if parts == 1 else jax.lax.psum(tree, DATA)

    def prepare(own: Params, lent: Tree) -> Params:
        assert layer.prepare is not None, "called where there is something to prepare"
        return layer.prepare(lend(model, rows, own, lent))

    def borrowing(own: Params, lent: Tree | None) -> Params:
        return own if lent is None else lend(model, rows, own, lent)

    def forward(own: Params, lent: Tree | None, x: Tree, state: Tree, unit: Unit, total: Array | None) -> Tree:
        ctx = context(unit, time_of(x), train=True)
        state, y, saved = layer.forward(borrowing(own, lent), x, state, ctx)
        return state, added(total, y), saved

    def backward(
        own: Params, lent: Tree | None, saved: Tree, dy: Tree, dstate: Tree, unit: Unit, summed: Tree, *, time: int
    ) -> Tree:
        ctx = context(unit, time, train=True)
        dx, dstate, tape = layer.backward(borrowing(own, lent), saved, dy, dstate, ctx)
        timed, new = split_tape(layer.join, tape)
        # What is added up is donated later: it must be no array that anything else is too, so the first is copied.
        return dx, dstate, timed, jax.tree.map(jnp.copy, new) if summed is None else jax.tree.map(jnp.add, summed, new)

    def weight_gradient(
        own: Params,
        lent: Tree,
        timed: tuple[Tree, ...],
        summed: Tree,
        unit: Unit,
        so_far: Gradients | None,
        *,
        time: int,
    ) -> Gradients:
        tape = merge_tape(layer.join, join_time(timed), summed)
        gradients = layer.weight_gradient(lend(model, rows, own, lent), tape, context(unit, time, train=True))
        gradients = summed_over_rows(Gradients(*settle(model, rows, gradients)))
        return jax.tree.map(jnp.copy, gradients) if so_far is None else jax.tree.map(jnp.add, so_far, gradients)

    def evaluate(own: Params, lent: Tree | None, x: Tree, state: Tree, unit: Unit, total: Array | None) -> Tree:
        state, y, _ = layer.forward(borrowing(own, lent), x, state, context(unit, time_of(x), train=False))
        return state, added(total, y)

    def infer(own: Params, lent: Tree, x: Tree, state: Tree, unit: Unit) -> Tree:
        return layer.infer(lend(model, rows, own, lent), x, state, context(unit, time_of(x), train=False))

    def split(carry: Tree, resets: Array, initial: Tree, splits: tuple[tuple[int, int], ...]) -> Tree:
        """The state of each micro-batch before a batch: the carried one, rows that reset and padding rows aside."""
        size = -(-max(last - first for first, last in splits) // parts) * parts
        whole = reset_rows(resets, initial, carry)
        return tuple(jax.tree.map(functools.partial(_piece, rows=rows, size=size), whole) for rows in splits)

    def update(own: Params, state: Tree, gradients: Params, norm: Array, denominator: Array, rate: Array) -> Tree:
        return optimizers.update(optimizer, own, state, gradients, norm, denominator, rate, max_norm=max_norm)

    return Stage(
        number=index,
        rows=rows,
        sharding=sharding,
        layer=layer,
        is_last=is_last,
        init=layer.init,
        prepare=None if layer.prepare is None else prepare,
        forward=forward,
        backward=backward,
        weight_gradient=weight_gradient,
        evaluate=evaluate,
        infer=infer,
        split=split,
        update=update,
    )


def _piece(x: Array, rows: tuple[int, int], size: int) -> Array:
    """Some rows of x [B, ...], with rows of zeros after them up to `size`."""
    first, last = rows
    if size == last - first:
        return x[first:last]
    return jnp.pad(x[first:last], [(0, size - (last - first))] + [(0, 0)] * (x.ndim - 1))


def merge(pieces: tuple[Tree, ...], splits: tuple[tuple[int, int], ...]) -> Tree:
    """The carried state of a whole batch from its micro-batches', without their padding rows."""

    def whole(*leaves: Array) -> Array:
        return jnp.concatenate([leaf[: last - first] for leaf, (first, last) in zip(leaves, splits, strict=True)])

    return jax.tree.map(whole, *pieces)
