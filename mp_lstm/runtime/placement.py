"""Where arrays live: one mesh a stage, and the only function that moves data between stages.

Every array that enters a program is committed with one of its stage's shardings, so nothing depends on a default
device. On one device there is but one: whole. On a mesh of several, with the axes data and model, there are

    whole        numbers, keys, carried state    a copy on each device
    over_steps   [T, B, ...] of a unit           rows over data
    over_rows    [B, ...] of a micro-batch       rows over data
    own_part     what F keeps for B and W        each device has an array of its own, behind a first axis of devices
    parameters   by the table of the layers      vocabulary over model, the rest whole

Axis types are Auto: programs are written for one device, and either run as they are on each device's rows
(`partition`), or are divided by the compiler.

With several processes a stage belongs to one of them. The others hold `Elsewhere` in place of its arrays, so that all
go through the same walk, of which each enqueues its own part:

    transfer        target here                 target in another process
    source here     device_put                  sent (`edges`), gives Elsewhere
    source there    received (`edges`)          nothing, gives Elsewhere
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mp_lstm.errors import InputError
from mp_lstm.layers.sharding import Axes, map_with_axes
from mp_lstm.planning.group import members, shape
from mp_lstm.runtime import edges

Device = Any
Tree = Any

DATA, MODEL = "data", "model"


@dataclasses.dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands for an array of another process's stage."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding

    @property
    def ndim(self) -> int:
        """Number of its dimensions."""
        return len(self.shape)


def stage_sharding(place: Any) -> NamedSharding:
    """The sharding of what a stage has whole: on its device, or on each device of its group."""
    for device in members(place):
        if not isinstance(device, jax.Device):
            raise InputError(
                f"a stage's device is {device!r}, one of JAX's is wanted: pass devices=jax.devices() to make_plan"
            )
    devices = np.array(members(place))
    if len(devices) == 1:
        mesh = Mesh(devices, (DATA,), axis_types=(AxisType.Auto,))
    else:
        mesh = Mesh(devices.reshape(shape(place)), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec())


def over_steps(stage: NamedSharding) -> NamedSharding:
    """Of [T, B, ...]: rows over data."""
    return _divided(stage, None, DATA)


def over_rows(stage: NamedSharding) -> NamedSharding:
    """Of [B, ...]: rows over data."""
    return _divided(stage, DATA)


def own_part(stage: NamedSharding) -> NamedSharding:
    """Of [devices, ...]: a part for each."""
    return _divided(stage, (DATA, MODEL))


def _divided(stage: NamedSharding, *axes: Any) -> NamedSharding:
    return stage if stage.mesh.size == 1 else NamedSharding(stage.mesh, PartitionSpec(*axes))


def parts_of(stage: NamedSharding, axis: str) -> int:
    """Parts along an axis of a stage's mesh."""
    return stage.mesh.shape.get(axis, 1)


def parameters(tree: Tree, stage: NamedSharding, *, whole: bool = True) -> Tree:
    """The shardings of a stage's parameters, gradients or optimizer state, by the table of the layers.

    Args:
      tree: arrays or structs; those that the table names and whose size does not divide (as of an optimizer that keeps
        less than a value for each parameter) are whole.
      stage: what the stage has whole.
      whole: whether the sizes are those of whole arrays, not of a device's part of them.
    """
    if parts_of(stage, MODEL) == 1:
        return jax.tree.map(lambda leaf: stage, tree)

    def of(leaf: Any, axes: Axes) -> NamedSharding:
        sizes = [size for size, axis in zip(leaf.shape, axes, strict=False) if axis is not None]
        divides = not whole or all(size % parts_of(stage, MODEL) == 0 for size in sizes)
        return _divided(stage, *axes) if divides else stage

    return map_with_axes(of, tree)


def is_here(sharding: NamedSharding) -> bool:
    """Whether a stage belongs to this process."""
    return sharding.is_fully_addressable


def process_of(sharding: NamedSharding) -> int:
    """The process that a stage belongs to."""
    return next(iter(sharding.device_set)).process_index


def transfer(tree: Tree, sharding: NamedSharding, what: Any = "") -> Tree:
    """Sends the arrays of one stage to another. Structs of arrays are sent likewise, for a walk that only compiles.

    Args:
      tree: of one stage.
      sharding: of all of it; where it is what the stage has whole, `parameters` come to lie in their parts.
      what: it is, for those who wait for it in another process.
    """
    leaves = jax.tree.leaves(tree)
    held = getattr(leaves[0], "sharding", sharding) if leaves else sharding  # a host's array is in every process
    if is_here(sharding) and is_here(held):
        return jax.tree.map(_placed, tree, _for_each(tree, sharding))
    source, target = process_of(held), process_of(sharding)
    if source != target and jax.process_index() in (source, target):
        there = structs(tree, sharding)
        if isinstance(leaves[0], jax.ShapeDtypeStruct):
            edges.prepare_move(there, source, target)
        elif is_here(sharding):
            return jax.tree.map(_placed, edges.receive(there, source, what), _for_each(there, sharding))
        else:
            edges.send(tree, target, what)
    return jax.tree.map(_placed_elsewhere, tree, _for_each(tree, sharding))


def everywhere(tree: Tree, what: Any = "") -> Tree:
    """Gives every process the arrays of one stage; alone, a process has them as they are.

    All processes call it, in the same order as other transfers. Negative zeros lose their sign on the way.

    Args:
      tree: of one stage.
      what: it is, for those who wait for it.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves or jax.process_count() == 1:
        return tree
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return edges.prepare_sum(tree)
    return edges.summed(tree if is_here(leaves[0].sharding) else None, structs(tree), what)


def put(tree: Tree, sharding: NamedSharding) -> Tree:
    """Places host arrays on a stage, as `transfer`. They may be aliased: never write to them again."""
    place = jax.device_put if is_here(sharding) else _standing_for_host
    return jax.tree.map(place, tree, _for_each(tree, sharding))


def computed(function: Callable[..., Tree], sharding: NamedSharding, *args: Tree) -> Tree:
    """What a function gives, where `transfer` would send it; `args` are on the same devices."""
    results = jax.eval_shape(function, *structs(args))
    if is_here(sharding):
        return jax.jit(function, out_shardings=_for_each(results, sharding))(*args)
    return elsewhere(results, sharding)


def elsewhere(tree: Tree, sharding: NamedSharding) -> Tree:
    """What stands for arrays of these shapes and types on another process's stage."""
    return standing_for(structs(tree, sharding))


def standing_for(tree: Tree) -> Tree:
    """What stands for another process's arrays, of which these are structs."""
    return jax.tree.map(lambda leaf: Elsewhere(leaf.shape, leaf.dtype, leaf.sharding), tree)


def structs(tree: Tree, sharding: NamedSharding | None = None) -> Tree:
    """Shapes, types and shardings of a tree of arrays; with other shardings, where `transfer` would send them."""

    def struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    if sharding is None:
        return jax.tree.map(lambda leaf: struct(leaf, leaf.sharding), tree)
    return jax.tree.map(struct, tree, _for_each(tree, sharding))


def _for_each(tree: Tree, sharding: NamedSharding) -> Tree:
    if sharding.num_devices > 1 and sharding.spec == PartitionSpec():
        return parameters(tree, sharding)
    return jax.tree.map(lambda leaf: sharding, tree)


def _placed(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)


def _placed_elsewhere(leaf: Any, sharding: NamedSharding) -> Any:
    kind = jax.ShapeDtypeStruct if isinstance(leaf, jax.ShapeDtypeStruct) else Elsewhere
    return kind(leaf.shape, leaf.dtype, sharding=sharding)


def _standing_for_host(leaf: Any, sharding: NamedSharding) -> Elsewhere:
    return Elsewhere(np.shape(leaf), edges.dtype_of(leaf), sharding)
