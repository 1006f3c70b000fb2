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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mp_lstm.errors import InputError
from mp_lstm.layers.sharding import Axes, map_with_axes
from mp_lstm.planning.group import members, shape

Device = Any
Tree = Any

DATA, MODEL = "data", "model"


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


def transfer(tree: Tree, sharding: NamedSharding) -> Tree:
    """Sends arrays to a stage. Structs of arrays are sent likewise, for a walk that only compiles.

    Args:
      tree: of arrays or structs.
      sharding: of all of them; where it is what the stage has whole, `parameters` come to lie in their parts.
    """

    def send(leaf: Any, sharding: NamedSharding) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(send, tree, _for_each(tree, sharding))


def put(tree: Tree, sharding: NamedSharding) -> Tree:
    """Places host arrays on a stage, as `transfer`. They may be aliased: never write to them again."""
    return jax.tree.map(jax.device_put, tree, _for_each(tree, sharding))


def computed(function: Callable[..., Tree], sharding: NamedSharding, *args: Tree) -> Tree:
    """What a function gives, where `transfer` would send it; `args` are on the same devices."""
    return jax.jit(function, out_shardings=_for_each(jax.eval_shape(function, *args), sharding))(*args)


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
