"""The layer protocol: a layer is a record of pure functions in three phases.

F (forward) saves what the other phases need, B (backward) yields the input gradient that the layer below waits for, and
W (weight gradient) does the large products nobody waits for. Splitting B from W takes W off the critical path of a
pipeline. Layers compose: `chain` of layers is a layer, so a stage of a pipeline is one too, and `apply` turns any
layer into an ordinary differentiable function, so the same three phases serve `jax.grad` with no pipeline at all.

Nothing here knows devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Integer, Key

from mp_lstm.planning.costs import Cost, total

Join = Any  # "time", "sum", or a tuple of joins, one for each child of a chain
Params = Any
State = Any
Saved = Any
Tape = Any


@struct.dataclass
class Context:
    """What a unit is: where it lies in its batch, which steps are real, and what the loss needs.

    Args:
      key: dropout key of the layer (folded with the layer's place), or None outside training.
      counter: number of the batch since training began; dropout masks change with it.
      start: time step of the batch at which this chunk begins.
      row: row of the batch at which this micro-batch begins.
      mask: [T, B] True for real steps; None: all are real.
      targets, weights: [T, B, ...] and [T, B], for heads.
      scale: gradient of what is minimised by the loss's sum, for layers that add terms to it. A pipeline divides its
        gradients afterwards, so there it is 1.
      train: whether dropout and other regularisers act.
    """

    key: Key[Array, ""] | None = None
    counter: Integer[Array, ""] | int = 0
    start: Integer[Array, ""] | int = 0
    row: Integer[Array, ""] | int = 0
    mask: Bool[Array, "T B"] | None = None
    targets: Any = None
    weights: Float[Array, "T B"] | None = None
    scale: Float[Array, ""] | float = 1.0
    train: bool = struct.field(pytree_node=False, default=False)


class Layer(NamedTuple):
    """A layer: its name and its pure functions.

    Args:
      name, kind: for tables and messages.
      init: key -> params.
      init_state: batch size -> state carried over time; () for none.
      forward: (params, x, state, ctx) -> (state, y, saved).
      backward: (params, saved, dy, dstate, ctx) -> (dx or None, dstate, tape); dstate is as `zero_gradient` has it.
      weight_gradient: (params, tape, ctx) -> dparams, of one micro-batch, its chunks joined.
      infer: (params, x, state, ctx) -> (state, y); y is the prediction, where forward's y is the loss.
      cost: (batch size, time steps) -> Cost.
      join: how the tapes of chunks become one: "time" concatenates leaves along their first axis, "sum" adds.
      chunkable: False where time cannot be cut (a bidirectional layer).
      borrows: the params given to this layer are `Borrowed(own, lent)`, `lent` being another row's (see `Tie`).
      prepare: params -> parameters that F and B find the same with, sooner, as rounded ones; made once a step instead
        of once a unit. None: there is nothing to make. W is given the parameters themselves.
      input_ids, target_ids: V where its inputs, or its targets, are ids [T, B] from 0 to V-1; None: they are no ids.
      lean: the same layer, parameters and results, that keeps less and computes more: what rematerialisation runs in
        its place. None: there is none. A function that changes a layer's phases changes those of this one too.
    """

    name: str
    kind: str
    init: Callable[[Any], Params]
    init_state: Callable[[int], State]
    forward: Callable[..., tuple[State, Any, Saved]]
    backward: Callable[..., tuple[Any, State, Tape]]
    weight_gradient: Callable[..., Params]
    infer: Callable[..., tuple[State, Any]]
    cost: Callable[[int, int], Cost]
    join: Join = "time"
    chunkable: bool = True
    borrows: bool = False
    prepare: Callable[[Params], Params] | None = None
    input_ids: int | None = None
    target_ids: int | None = None
    lean: Layer | None = None


def leaner(layer: Layer) -> Layer:
    """The lean variant of a layer, or where it has none the layer itself."""
    return layer if layer.lean is None else layer.lean


class Borrowed(NamedTuple):
    """Parameters of a layer that borrows: its own, and those lent by another row."""

    own: Params
    lent: Params


def infer_by_forward(forward: Callable[..., tuple[State, Any, Saved]]) -> Callable[..., tuple[State, Any]]:
    """The `infer` of a layer whose forward's y already is its prediction."""

    def infer(params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any]:
        state, y, _ = forward(params, x, state, ctx)
        return state, y

    return infer


def dropout_key(key: Key[Array, ""]) -> Key[Array, ""]:
    """The key that dropout masks derive from, apart from the one that `init` uses."""
    return jax.random.fold_in(key, 0x64726F70)


def child_context(ctx: Context, index: int) -> Context:
    """The context of a child: its key folded with the child's place."""
    return ctx if ctx.key is None else dataclasses.replace(ctx, key=jax.random.fold_in(ctx.key, index))


def chain(layers: Sequence[Layer], *, name: str | None = None, first: int = 0) -> Layer:
    """Composes layers into one: y of each is x of the next.

    Params, states, saved values and tapes are tuples, one entry a layer. The key given to layer i is folded with
    `first + i`: a stage that begins at row `first` of a model gives its rows the keys that the whole model would.

    Args:
      layers: at least one layer.
      name: the chain's name; the last layer's by default.
      first: index of the first layer in the sequence it was cut from.

    Returns:
      The composed layer. Its kind is that of the layer with most parameters.

    Example:
      >>> import jax, mp_lstm
      >>> from mp_lstm.layers.base import chain
      >>> both = chain([mp_lstm.dense(3, 5), mp_lstm.dense(5, 2)])
      >>> [p.kernel.shape for p in both.init(jax.random.key(0))]
      [(3, 5), (5, 2)]
    """
    layers = tuple(layers)

    def init(key: Key[Array, ""]) -> Params:
        return tuple(layer.init(jax.random.fold_in(key, first + i)) for i, layer in enumerate(layers))

    def init_state(batch_size: int) -> State:
        return tuple(layer.init_state(batch_size) for layer in layers)

    def forward(params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any, Saved]:
        states, saved = [], []
        for i, layer in enumerate(layers):
            new_state, x, kept = layer.forward(params[i], x, state[i], child_context(ctx, first + i))
            states.append(new_state)
            saved.append(kept)
        return tuple(states), x, tuple(saved)

    def backward(params: Params, saved: Saved, dy: Any, dstate: State, ctx: Context) -> tuple[Any, State, Tape]:
        dstates, tapes = [], []
        for i, layer in reversed(list(enumerate(layers))):
            dy, below, tape = layer.backward(params[i], saved[i], dy, dstate[i], child_context(ctx, first + i))
            dstates.append(below)
            tapes.append(tape)
        return dy, tuple(reversed(dstates)), tuple(reversed(tapes))

    def weight_gradient(params: Params, tape: Tape, ctx: Context) -> Params:
        return tuple(
            layer.weight_gradient(params[i], tape[i], child_context(ctx, first + i)) for i, layer in enumerate(layers)
        )

    def infer(params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any]:
        states = []
        for i, layer in enumerate(layers):
            new_state, x = layer.infer(params[i], x, state[i], child_context(ctx, first + i))
            states.append(new_state)
        return tuple(states), x

    def prepare(params: Params) -> Params:
        return tuple(p if layer.prepare is None else layer.prepare(p) for layer, p in zip(layers, params, strict=True))

    def cost(batch_size: int, time: int) -> Cost:
        return total(layer.cost(batch_size, time) for layer in layers)

    name = name or layers[-1].name
    has_lean = any(layer.lean is not None for layer in layers)
    heaviest = max(layers, key=lambda layer: layer.cost(1, 1).parameters)
    return Layer(
        name=name,
        kind=heaviest.kind,
        init=init,
        init_state=init_state,
        forward=forward,
        backward=backward,
        weight_gradient=weight_gradient,
        infer=infer,
        cost=cost,
        join=tuple(layer.join for layer in layers),
        chunkable=all(layer.chunkable for layer in layers),
        prepare=prepare if any(layer.prepare for layer in layers) else None,
        input_ids=layers[0].input_ids,
        target_ids=layers[-1].target_ids,
        lean=chain([leaner(layer) for layer in layers], name=name, first=first) if has_lean else None,
    )


def residual(layer: Layer) -> Layer:
    """Adds a layer's input to its output; input and output have one shape.

    References:
      He et al. 2016, https://arxiv.org/abs/1512.03385; between LSTM layers: Wu et al. 2016,
      https://arxiv.org/abs/1609.08144
    """

    def forward(params: Params, x: Array, state: State, ctx: Context) -> tuple[State, Array, Saved]:
        state, y, saved = layer.forward(params, x, state, ctx)
        return state, x + y, saved

    def backward(params: Params, saved: Saved, dy: Array, dstate: State, ctx: Context) -> tuple[Array, State, Tape]:
        dx, dstate, tape = layer.backward(params, saved, dy, dstate, ctx)
        return dx + dy, dstate, tape

    def infer(params: Params, x: Array, state: State, ctx: Context) -> tuple[State, Array]:
        state, y = layer.infer(params, x, state, ctx)
        return state, x + y

    lean = None if layer.lean is None else residual(layer.lean)
    return layer._replace(forward=forward, backward=backward, infer=infer, lean=lean)


def split_tape(join: Join, tape: Tape) -> tuple[Tape, Tape]:
    """Splits a tape into what is joined over time and what is summed; None stands for what is not there."""
    if isinstance(join, tuple):
        parts = [split_tape(part, tape[i]) for i, part in enumerate(join)]
        return tuple(timed for timed, _ in parts), tuple(summed for _, summed in parts)
    return (tape, None) if join == "time" else (None, tape)


def merge_tape(join: Join, timed: Tape, summed: Tape) -> Tape:
    """Inverse of `split_tape`."""
    if isinstance(join, tuple):
        return tuple(merge_tape(part, timed[i], summed[i]) for i, part in enumerate(join))
    return timed if join == "time" else summed


def join_time(tapes: Sequence[Tape]) -> Tape:
    """Joins the timed parts of the tapes of a micro-batch's chunks, in order of time."""
    return tapes[0] if len(tapes) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *tapes)


def apply(layer: Layer, params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any]:
    """Runs a layer as an ordinary function whose gradient is the layer's own B and W.

    Args:
      layer: the layer; params, x and state as its `forward` takes them.
      ctx: the unit's context; it has no gradient.

    Returns:
      The new state and y, differentiable in params, x (where it is floating) and state.

    Example:
      >>> import jax, jax.numpy as jnp, mp_lstm
      >>> from mp_lstm.layers.base import Context, apply
      >>> layer = mp_lstm.dense(3, 2)
      >>> params = layer.init(jax.random.key(0))
      >>> loss = lambda p: apply(layer, p, jnp.ones((4, 1, 3)), (), Context())[1].sum()
      >>> jax.grad(loss)(params).kernel.shape
      (3, 2)
    """

    @jax.custom_vjp
    def run(params: Params, x: Any, state: State, ctx: Context) -> tuple[State, Any]:
        state, y, _ = layer.forward(params, x, state, ctx)
        return state, y

    def run_forward(params: Params, x: Any, state: State, ctx: Context) -> tuple[tuple[State, Any], Any]:
        state, y, saved = layer.forward(params, x, state, ctx)
        return (state, y), (params, x, saved, ctx)

    def run_backward(kept: Any, cotangent: tuple[State, Any]) -> tuple[Params, Any, State, Any]:
        params, x, saved, ctx = kept
        dstate, dy = cotangent
        if getattr(dy, "ndim", None) == 0:  # y is a loss
            ctx = dataclasses.replace(ctx, scale=dy)
        dx, dbefore, tape = layer.backward(params, saved, dy, dstate, ctx)
        dparams = layer.weight_gradient(params, tape, ctx)
        # JAX's own zeros of what has no gradient are those that it gave for the state afterwards.
        dbefore = jax.tree.map(lambda new, old: old if old.dtype == jax.dtypes.float0 else new, dbefore, dstate)
        return dparams, zero_cotangent(x) if dx is None else dx, dbefore, zero_cotangent(ctx)

    run.defvjp(run_forward, run_backward)
    return run(params, x, state, ctx)


def zero_cotangent(tree: Any) -> Any:
    """Zero gradients of a tree: float0 for integers, booleans and keys, zeros for the rest."""

    def zero(leaf: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return jnp.zeros_like(leaf)
        return np.zeros(np.shape(leaf), jax.dtypes.float0)

    return jax.tree.map(zero, tree)


def zero_gradient(state: State) -> State:
    """Zero gradients of a state, as layers hand them on: those of its floating arrays, and false for all others'."""

    def zero(leaf: Any) -> Array:
        return jnp.zeros(jnp.shape(leaf), leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else bool)

    return jax.tree.map(zero, state)


def mask_steps(mask: Bool[Array, "T B"] | None, x: Array) -> Array:
    """Zeroes the padded steps of x [T, B, ...]."""
    if mask is None:
        return x
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def steps_mask(lengths: Integer[Array, " B"] | None, start: Integer[Array, ""] | int, time: int) -> Array | None:
    """[T, B] mask of real steps of a chunk of `time` steps that begins at `start`; None where every step is real."""
    if lengths is None:
        return None
    return (start + jnp.arange(time, dtype=jnp.int32))[:, None] < lengths[None, :]


def flat_rows(x: Array) -> Array:
    """[T, B, D] as rows [T*B, D]: products over two axes at once would copy."""
    return x.reshape((-1, x.shape[-1]))
