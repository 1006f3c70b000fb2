"""Edges: how arrays pass between processes, by collectives that all their processes enqueue in one order.

    send, receive   two processes, a permutation over a mesh of one device of each
    summed          all processes, a sum over one device of each, of which all but the giver give zeros

A collective holds up the queue of its device until the last of its processes joins in. On CPUs each process therefore
keeps its last device for edges alone (`stage_devices` leaves it out); accelerators use a device that computes.

Nothing here can deadlock while all processes enqueue parts of one total order: the first task that is not done waits
for earlier ones only, and nothing that waits for it stands before it in any queue.

The last transfers are remembered, so that a process whose peer has stopped can say what it waits for (`watchdog`).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Tree = Any

AXIS = "edge"


class Transfer(NamedTuple):
    """A transfer that was enqueued: what it is, in words, and a small result that is there when it is done."""

    what: str
    done: Any


transfers: collections.deque[Transfer] = collections.deque(maxlen=4096)
"""Transfers of this process, the oldest first; those that are done may have left."""


def stage_devices() -> list[Any]:
    """The devices that stages may be on, those of process 0 first: all, but the ones that edges take.

    Example:
      >>> stage_devices() == jax.devices()
      True
    """
    found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if jax.process_count() == 1:
        return jax.devices()
    taken = {edge_device(process) for process in range(jax.process_count())}
    spared = [device for device in found if device.platform != "cpu" or device not in taken]
    return spared if {device.process_index for device in spared} == set(range(jax.process_count())) else found


@functools.cache
def edge_device(process: int) -> Any:
    """The device of a process that its edges use: its last one."""
    return max((d for d in jax.devices() if d.process_index == process), key=lambda device: device.id)


def dtype_of(leaf: Any) -> Any:
    """The type that a host array has on a device."""
    return leaf.dtype if isinstance(leaf, jax.Array) else jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)


def send(tree: Tree, target: int, what: Any = "") -> None:
    """Enqueues the sending of arrays to another process, which enqueues `receive`."""
    source = jax.process_index()
    _run(_mover(_signature(tree), source, target), jax.tree.leaves(tree), f"{what} to process {target}")


def receive(structs: Tree, source: int, what: Any = "") -> Tree:
    """Enqueues the receiving of arrays from another process; they come on this process's edge device."""
    program = _mover(_signature(structs), source, jax.process_index())
    return _run_tree(program, [_zeros(*leaf) for leaf in _signature(structs)], structs, f"{what} from process {source}")


def summed(tree: Tree | None, structs: Tree, what: Any = "") -> Tree:
    """Enqueues the sum of what all processes give; it comes on each one's edge device.

    Args:
      tree: what this process gives; None: zeros.
      structs: of it.
      what: it is.
    """
    signature = _signature(structs)
    given = [_zeros(*leaf) for leaf in signature] if tree is None else jax.tree.leaves(tree)
    return _run_tree(_adder(signature), given, structs, f"{what} of all processes")


def as_global(leaf: jax.Array) -> jax.Array:
    """An array of this process as one of all processes, for a library that only writes such; alone, as it is."""
    if jax.process_count() == 1:
        return leaf
    own = jax.process_index()
    others = [process for process in range(jax.process_count()) if process != own]
    sharding = _replicated((own, *others))  # this process's copy counts as the first one
    copy = jax.device_put(leaf, edge_device(own))
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [copy])


def prepare_move(structs: Tree, source: int, target: int) -> None:
    """Compiles what `send` and `receive` run."""
    _mover(_signature(structs), source, target)


def prepare_sum(structs: Tree) -> Tree:
    """Compiles what `summed` runs; gives structs of its results."""
    _adder(_signature(structs))
    sharding = jax.sharding.SingleDeviceSharding(edge_device(jax.process_index()))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), structs)


Signature = tuple[tuple[tuple[int, ...], str], ...]


class _Edge(NamedTuple):
    """A compiled collective, and the sharding of its arguments."""

    compiled: Callable[..., Any]
    sharding: NamedSharding


def _signature(tree: Tree) -> Signature:
    return tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree))


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype), edge_device(jax.process_index()))


@functools.cache
def _mover(signature: Signature, source: int, target: int) -> _Edge:
    return _compiled(
        f"edge_{source}_{target}", signature, (source, target), lambda leaf: jax.lax.ppermute(leaf, AXIS, [(0, 1)])
    )


@functools.cache
def _adder(signature: Signature) -> _Edge:
    processes = tuple(range(jax.process_count()))
    return _compiled("edge_sum", signature, processes, lambda leaf: jax.lax.psum(leaf, AXIS))


def _compiled(name: str, signature: Signature, processes: Sequence[int], collective: Callable[..., Any]) -> _Edge:
    """A program over one device of each process. All of them are told that they hold the same, and they need not."""
    sharding = _replicated(processes)

    def body(leaves: tuple[Any, ...]) -> tuple[list[Any], Any]:
        results = [collective(leaf) for leaf in leaves]
        return results, _marker(results[0])

    replicated = PartitionSpec()
    function = jax.shard_map(body, mesh=sharding.mesh, in_specs=(replicated,), out_specs=replicated, check_vma=False)
    function.__name__ = function.__qualname__ = name
    args = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in signature)
    return _Edge(jax.jit(function).lower(args).compile(), sharding)


def _replicated(processes: Sequence[int]) -> NamedSharding:
    """The sharding of arrays that each of these processes has on its edge device."""
    devices = np.array([edge_device(process) for process in processes])
    return NamedSharding(Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,)), PartitionSpec())


def _marker(result: Any) -> Any:
    """A number that is there when a result is.

    It comes of a product of 16 x 16, since a program of fewer than 1,000 operations runs in the thread that enqueues
    it, which would wait for its peer.
    """
    first = result.ravel()[:1].astype(jnp.float32)
    square = jnp.broadcast_to(first, (16, 16))
    return jnp.sum(square @ square)


def _run(edge: _Edge, leaves: Sequence[Any], what: str) -> list[Any]:
    device = edge_device(jax.process_index())
    placed = [jax.device_put(leaf, device) for leaf in leaves]
    whole = tuple(jax.make_array_from_single_device_arrays(leaf.shape, edge.sharding, [leaf]) for leaf in placed)
    results, done = edge.compiled(whole)
    transfers.append(Transfer(what, done))
    return results


def _run_tree(edge: _Edge, leaves: Sequence[Any], like: Tree, what: str) -> Tree:
    results = [result.addressable_data(0) for result in _run(edge, leaves, what)]
    return jax.tree.unflatten(jax.tree.structure(like), results)
