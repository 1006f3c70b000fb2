"""Where arrays live: one mesh a stage, one sharding a mesh, and the only function that moves data between stages.

Every array that enters a program is committed with its stage's sharding, so nothing depends on a default device.

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
from mp_lstm.runtime import edges

Device = Any
Tree = Any


@dataclasses.dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands for an array of another process's stage."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding


def stage_sharding(device: Device) -> NamedSharding:
    """The sharding of a stage's arrays: whole, on the stage's mesh."""
    if not isinstance(device, jax.Device):
        raise InputError(
            f"a stage's device is {device!r}, one of JAX's is wanted: pass devices=jax.devices() to make_plan"
        )
    mesh = Mesh(np.array([device]), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec())


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
      sharding: of the stage that wants it.
      what: it is, for those who wait for it in another process.
    """
    leaves = jax.tree.leaves(tree)
    held = getattr(leaves[0], "sharding", sharding) if leaves else sharding  # a host's array is in every process
    if is_here(sharding) and is_here(held):
        return jax.tree.map(lambda leaf: _placed(leaf, sharding), tree)
    source, target = process_of(held), process_of(sharding)
    if source != target and jax.process_index() in (source, target):
        there = structs(tree, sharding)
        if isinstance(leaves[0], jax.ShapeDtypeStruct):
            edges.prepare_move(there, source, target)
        elif is_here(sharding):
            return jax.tree.map(lambda leaf: _placed(leaf, sharding), edges.receive(there, source, what))
        else:
            edges.send(tree, target, what)
    return jax.tree.map(lambda leaf: _placed_elsewhere(leaf, sharding), tree)


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
    """Places host arrays on a stage. They may be aliased: never write to them again."""
    if is_here(sharding):
        return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), tree)
    return jax.tree.map(lambda leaf: Elsewhere(np.shape(leaf), edges.dtype_of(leaf), sharding), tree)


def computed(function: Callable[..., Tree], sharding: NamedSharding, *args: Tree) -> Tree:
    """What a function of a stage's arrays gives, on the stage."""
    if is_here(sharding):
        return jax.jit(function, out_shardings=sharding)(*args)
    return elsewhere(jax.eval_shape(function, *structs(args)), sharding)


def elsewhere(tree: Tree, sharding: NamedSharding) -> Tree:
    """What stands for arrays of these shapes and types on another process's stage."""
    return jax.tree.map(lambda leaf: Elsewhere(leaf.shape, leaf.dtype, sharding), tree)


def structs(tree: Tree, sharding: NamedSharding | None = None) -> Tree:
    """Shapes, types and shardings of a tree of arrays."""

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding)

    return jax.tree.map(struct, tree)


def _placed(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)


def _placed_elsewhere(leaf: Any, sharding: NamedSharding) -> Any:
    kind = jax.ShapeDtypeStruct if isinstance(leaf, jax.ShapeDtypeStruct) else Elsewhere
    return kind(leaf.shape, leaf.dtype, sharding=sharding)
