"""A state by placement row, as checkpoints keep it: arrays with names that no partition changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from mp_lstm.runtime import State
from mp_lstm.runtime.placement import Tree


def rows_of(state: State) -> dict[str, Sequence[Tree]]:
    """What a state holds for each row; `carry` is empty where none is carried."""
    return {
        "params": [row for stage in state.stages for row in stage.own],
        "optimizer": [row for stage in state.stages for row in stage.optimizer],
        "carry": [row for stage in state.carry or () for row in stage],
    }


def tree_of(state: State) -> dict[str, dict[str, Any]]:
    """The arrays of a state by part and name."""
    return {part: dict(_named(rows)) for part, rows in rows_of(state).items()}


def _named(rows: Sequence[Tree]) -> Iterator[tuple[str, Any]]:
    """The leaves of each row, named after the row's number and their place in it: "3.kernel", "3[0].mu.kernel"."""
    for i, row in enumerate(rows):
        for path, leaf in jax.tree.leaves_with_path(row):
            yield f"{i}{jax.tree_util.keystr(path)}", leaf


def unflattened(rows: Sequence[Tree], arrays: Mapping[str, Any]) -> tuple[Tree, ...]:
    """Rows of the same structure with the named arrays in them."""
    named = iter([arrays[name] for name, _ in _named(rows)])
    return tuple(jax.tree.map(lambda _: next(named), row) for row in rows)
