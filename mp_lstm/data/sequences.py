"""Sequences of any features, one after another in flat arrays.

A split of a corpus is the special case whose features are tokens. Everything that makes batches sees only this: flat
arrays of steps, and where each sequence starts. `gather` is the one place where padded batches are made.

Pytrees are walked here without JAX, so that reading data needs none: dicts, lists, tuples, named tuples and None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from mp_lstm.errors import InputError
from mp_lstm.layers.batch import Batch

Tree = Any


class Sequences(NamedTuple):
    """Sequences with a target for every step.

    Args:
      inputs: pytree of [N, ...] arrays: the steps of all sequences, one after another.
      targets: pytree of [N, ...] arrays.
      offsets: [sequences + 1] where each sequence starts, and N.
    """

    inputs: Tree
    targets: Tree
    offsets: Int64[np.ndarray, " sequences_and_1"]


def join_sequences(inputs: Sequence[Tree], targets: Sequence[Tree]) -> Sequences:
    """Lays sequences one after another.

    Args:
      inputs: of each sequence, a pytree of [t, ...] arrays. t may differ between sequences; all else is the same.
      targets: of each sequence, a pytree of [t, ...] arrays of the same t.

    Returns:
      The sequences, copied.

    Raises:
      InputError: there are none, or one has another structure than the first, or no or several lengths.

    Example:
      >>> join_sequences([np.zeros((2, 3)), np.ones((1, 3))], [np.array([4, 5]), np.array([6])]).offsets
      array([0, 2, 3])
    """
    if len(inputs) != len(targets) or not len(inputs):
        raise InputError(f"got {len(inputs)} inputs and {len(targets)} targets: pass one of each for every sequence")
    steps = [map_tree(np.asarray, pair) for pair in zip(inputs, targets, strict=True)]
    lengths = [_length(step, index) for index, step in enumerate(steps)]
    wanted = map_tree(_step, steps[0])
    for index, step in enumerate(steps):
        if (got := map_tree(_step, step)) != wanted:
            raise InputError(
                f"sequence {index} has steps of {got}, sequence 0 of {wanted} (inputs, targets): make them the same"
            )
    joined = map_tree(lambda *leaves: np.concatenate(leaves), *steps)
    return Sequences(*joined, offsets=np.cumsum([0, *lengths]))


def gather(
    inputs: Tree,
    targets: Tree,
    starts: Integer[np.ndarray, " B"],
    lengths: Integer[np.ndarray, " B"],
    time: int,
    resets: np.ndarray | None = None,
) -> Batch:
    """Makes a batch of slices of flat arrays.

    Args:
      inputs: pytree of [N, ...] arrays.
      targets: pytree of [N, ...] arrays.
      starts: [B] first step of each row.
      lengths: [B] number of its steps, at most `time`; 0 for an empty row.
      time: T, the padded length.
      resets: [B] as in `Batch`.

    Returns:
      The batch. Its arrays are new and padded with zeros.

    Example:
      >>> gather(np.arange(10), np.arange(1, 11), np.array([2, 7]), np.array([3, 1]), 4).inputs.T
      array([[2, 3, 4, 0],
             [7, 0, 0, 0]])
    """
    steps = np.arange(time)[:, None]
    padding = steps >= lengths
    positions = np.where(padding, 0, starts + steps)

    def rows(leaf: np.ndarray) -> np.ndarray:
        padded = leaf[positions]
        padded[padding] = 0
        return padded

    return Batch(map_tree(rows, inputs), map_tree(rows, targets), lengths=lengths.astype(np.int32), resets=resets)


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Applies a function to the leaves of pytrees of one structure.

    Args:
      function: of a leaf of each tree.
      tree: nested dicts, lists, tuples and named tuples; None has no leaves, anything else is one.
      others: more trees.

    Returns:
      The tree of results.

    Example:
      >>> map_tree(lambda x, y: x + y, {"a": 1, "b": (2, None)}, {"a": 10, "b": (20, None)})
      {'a': 11, 'b': (22, None)}
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: map_tree(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        children = (map_tree(function, *children) for children in zip(tree, *others, strict=True))
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return function(tree, *others)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of a pytree, in the order of `map_tree`.

    Example:
      >>> leaves({"a": 1, "b": (2, None)})
      [1, 2]
    """
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def _length(pair: Tree, index: int) -> int:
    """The one length of a sequence's arrays."""
    lengths = {array.shape[0] if array.ndim else 0 for array in leaves(pair)}
    if len(lengths) != 1 or 0 in lengths:
        found = ", ".join(str(array.shape) for array in leaves(pair))
        raise InputError(
            f"sequence {index} has arrays of shapes {found}: "
            "its inputs and targets are arrays [t, ...] of one and the same t, at least 1"
        )
    return lengths.pop()


def _step(array: np.ndarray) -> str:
    """What one step of an array is; equal for all sequences."""
    return f"{array.dtype}{list(array.shape[1:])}"
