"""Single placement rows as stages of their own: what is compiled and timed to learn what a row costs.

A row keeps the functions that it has in a pipeline (`make_stage`), with arguments made up in the right shapes. Two rows
whose traces read the same are one: of eight equal LSTM layers, one is measured.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mp_lstm.layers.base import Params
from mp_lstm.layers.batch import Batch
from mp_lstm.layers.model import Model, Tie, ties_from_below
from mp_lstm.runtime import optimizer as optimizers
from mp_lstm.runtime.placement import Device, Tree, put, structs
from mp_lstm.runtime.stages import Stage, Unit, make_stage

CHUNKS = 4  # that W joins
TRACE_TIME = 4  # time steps of the traces that tell rows apart
MAX_NORM = 1.0  # U is timed with clipping


class Single(NamedTuple):
    """A placement row as a stage of its own.

    Args:
      stage: its functions.
      own, lent: structs of its parameters and of what another row lends it, pinned to the stage's device: a layer may
        choose its functions by that.
      given: both, as F and B take them.
      x: its input: structs, but arrays for the model's first row, whose values may matter.
      batch: gives `lengths`, and targets to the model's last row.
      is_last: whether it is the model's last row.
    """

    stage: Stage
    own: Params
    lent: tuple[Params, ...]
    given: tuple[Params, tuple[Params, ...] | None]
    x: Tree
    batch: Batch
    is_last: bool


class Work(NamedTuple):
    """A task that can be run over and over.

    Args:
      phase: its name.
      function: what is compiled.
      args: arrays, or structs to be filled with some numbers.
      donate: positions of arguments that a run consumes.
      again: (arguments of a run, its result) -> arguments of the next.
    """

    phase: str
    function: Callable[..., Tree]
    args: tuple[Tree, ...]
    donate: tuple[int, ...] = ()
    again: Callable[[tuple[Tree, ...], Tree], tuple[Tree, ...]] = lambda args, result: args


def tokens() -> Batch:
    """An example of a batch of tokens, padded."""
    inputs = np.arange(8, dtype=np.int32)[:, None]
    return Batch(inputs, inputs, lengths=np.full(1, 8, np.int32))


def isolate(
    model: Model, batch_size: int, optimizer: optax.GradientTransformation, example: Batch, device: Device
) -> Iterator[Single]:
    """Takes a model apart into its rows, each with the input that the row below would give it."""
    key = jax.random.key(0)
    x = example.inputs
    for index, row in enumerate(model.rows):
        owners = [model.rows[tie.owner] for tie in ties_from_below(model, range(index, index + 1))]
        # Behind its owner, as the second of two: where a row stands in the model must not show in its trace.
        alone = Model((*owners, row), tuple(Tie(0, 1) for _ in owners))
        stage = make_stage(alone, 0, range(len(owners), len(owners) + 1), device, optimizer, max_norm=MAX_NORM)
        own = structs(jax.eval_shape(stage.init, key), stage.sharding)
        lent = tuple(structs(jax.eval_shape(owner.init, key), stage.sharding) for owner in owners)
        prepare = stage.prepare
        single = Single(
            stage=stage,
            own=own,
            lent=lent,
            given=(own, lent)
            if prepare is None
            else (structs(jax.eval_shape(prepare, own, lent), stage.sharding), None),
            x=x,
            batch=example,
            is_last=index == len(model.rows) - 1,
        )
        yield single
        _, x, _ = jax.eval_shape(stage.forward, *forward(single, batch_size, TRACE_TIME).args)


def prepared_bytes(single: Single) -> int:
    """Bytes of the copies of its parameters that are made for F and B."""
    if single.stage.prepare is None:
        return 0
    jaxpr = jax.make_jaxpr(single.stage.prepare)(single.own, single.lent).jaxpr
    made = [var.aval for var in jaxpr.outvars if var not in jaxpr.invars]
    return sum(aval.size * aval.dtype.itemsize for aval in made)


def signature(single: Single, rows: int) -> str:
    """A word that two rows share if their programs are the same."""
    works = (forward(single, rows, TRACE_TIME), *backward_and_weight(single, rows, TRACE_TIME, add=False))
    return hashlib.sha256("\n".join(map(trace, works)).encode()).hexdigest()[:16]


def trace(work: Work) -> str:
    """The program of a task, as text without addresses of this process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jax.make_jaxpr(work.function)(*_traceable(work.args))))


def forward(single: Single, rows: int, time: int) -> Work:
    """F of one unit."""
    stage, x = single.stage, sized(single.x, time, rows)
    total = jax.ShapeDtypeStruct((), _dtype(single)) if single.is_last else None
    args = (*single.given, x, _state(single, rows), _unit(single, rows, time), total)
    return Work("forward", stage.forward, args)


def backward_and_weight(single: Single, rows: int, time: int, *, add: bool) -> tuple[Work, Work]:
    """B of one unit of `time` steps; W of `time` steps in chunks, that adds to a gradient or makes the first."""
    chunk = time // CHUNKS if single.stage.layer.chunkable else time
    unit, whole = _backward(single, rows, time), _backward(single, rows, chunk)
    _, _, timed, summed = jax.eval_shape(whole.function, *_traceable(whole.args))
    function = functools.partial(single.stage.weight_gradient, time=time)
    args = (single.own, single.lent, (timed,) * (time // chunk), summed, _unit(single, rows, time), None)
    if not add:
        return unit, Work("weight_gradient", function, args)
    args = (*args[:5], jax.eval_shape(function, *_traceable(args)))
    return unit, Work("weight_gradient", function, args, (5,), lambda args, result: (*args[:5], result))


def _backward(single: Single, rows: int, time: int) -> Work:
    args = forward(single, rows, time).args
    state, y, saved = jax.eval_shape(single.stage.forward, *_traceable(args))
    function = functools.partial(single.stage.backward, time=time)
    return Work("backward", function, (*single.given, saved, y, state, args[4], None))


def update(single: Single, optimizer: optax.GradientTransformation) -> Work:
    """U."""
    state = jax.eval_shape(functools.partial(optimizers.init, optimizer), single.own)
    scalar = jax.ShapeDtypeStruct((), _dtype(single))
    args = (single.own, state, single.own, scalar, scalar, scalar)
    return Work("update", single.stage.update, args, (0, 1), lambda args, result: (*result, *args[2:]))


def sized(tree: Tree, time: int, rows: int) -> Tree:
    """Arrays or structs of [T, B, ...] with other T and B; the values of arrays are repeated."""

    def leaf(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((time, rows, *x.shape[2:]), x.dtype)
        return np.asarray(x)[np.arange(time) % x.shape[0]][:, np.arange(rows) % x.shape[1]]

    return jax.tree.map(leaf, tree)


def filled(args: Tree, sharding: Any) -> Tree:
    """Arguments on a device: structs become arrays of small numbers, each its own."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return np.resize(_numbers(), x.shape).astype(x.dtype)
        return np.ones(x.shape, x.dtype)  # a mask keeps all

    return put(jax.tree.map(leaf, args), sharding)


@functools.cache
def _numbers() -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.5, 1 << 20).astype(np.float32)


def _traceable(args: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Shapes of what may be arrays of the host; structs stay pinned where they are."""

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(struct, args)


def _dtype(single: Single) -> Any:
    leaves: Sequence[Any] = jax.tree.leaves((single.own, single.lent))
    return jnp.result_type(*(leaf.dtype for leaf in leaves)) if leaves else jnp.float32


def _state(single: Single, rows: int) -> Tree:
    return jax.eval_shape(lambda: single.stage.layer.init_state(rows))


def _unit(single: Single, rows: int, time: int) -> Unit:
    """A unit at the beginning of a batch, every step real."""
    batch = single.batch
    parts: dict[str, Any] = {
        "key": jax.random.key(0),
        "counter": np.zeros((), np.uint32),
        "start": np.zeros((), np.int32),
        "row": np.zeros((), np.int32),
        "lengths": None if batch.lengths is None else np.full(rows, time, np.int32),
    }
    if single.is_last:
        parts |= {"targets": sized(batch.targets, time, rows), "weights": np.ones((time, rows), _dtype(single))}
    return Unit(**parts)
