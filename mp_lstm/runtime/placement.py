"""Where arrays live: one mesh a stage, one sharding a mesh, and the only function that moves data between stages.

Every array that enters a program is committed with its stage's sharding, so nothing depends on a default device.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mp_lstm.errors import InputError

Device = Any
Tree = Any


def stage_sharding(device: Device) -> NamedSharding:
    """The sharding of a stage's arrays: whole, on the stage's mesh."""
    if not isinstance(device, jax.Device):
        raise InputError(
            f"a stage's device is {device!r}, one of JAX's is wanted: pass devices=jax.devices() to make_plan"
        )
    mesh = Mesh(np.array([device]), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec())


def transfer(tree: Tree, sharding: NamedSharding) -> Tree:
    """Sends arrays to a stage. Structs of arrays are sent likewise, for a walk that only compiles."""

    def send(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(send, tree)


def put(tree: Tree, sharding: NamedSharding) -> Tree:
    """Places host arrays on a stage. They may be aliased: never write to them again."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), tree)


def structs(tree: Tree, sharding: NamedSharding | None = None) -> Tree:
    """Shapes, types and shardings of a tree of arrays."""

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding)

    return jax.tree.map(struct, tree)
