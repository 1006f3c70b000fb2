"""Which axes of which parameters may lie in parts on several devices: one table, for all that has parameters' shapes.

Gradients and an optimizer's moments are records of the same types, so the table holds for them too. Whatever it does
not name is whole on every device. An entry has, for all fields in order, one name a dimension, None where that is not
divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Layer
from mp_lstm.layers.decoder import HeadParams, TiedHeadParams
from mp_lstm.layers.embedding import EmbeddingParams
from mp_lstm.layers.vocabulary import AXIS

Axes = tuple[str | None, ...]

TABLE: dict[type, dict[str, Axes]] = {
    EmbeddingParams: {"table": (AXIS, None)},
    HeadParams: {"kernel": (None, AXIS), "bias": (AXIS,)},
    TiedHeadParams: {"bias": (AXIS,)},
}


def map_with_axes(function: Callable[[Any, Axes], Any], tree: Any) -> Any:
    """Maps (leaf, the axes of its dimensions) over a tree; () stands for axes none of which is divided.

    Args:
      function: of a leaf and its axes.
      tree: of parameters, of gradients, or an optimizer's state.

    Example:
      >>> import jax.numpy as jnp
      >>> params = (EmbeddingParams(jnp.zeros((6, 2))), jnp.zeros(3))
      >>> map_with_axes(lambda leaf, axes: axes, params)
      (EmbeddingParams(table=('model', None)), ())
    """

    def of(node: Any) -> Any:
        if type(node) not in TABLE:
            return function(node, ())
        return type(node)(*(_leaf(function, getattr(node, name), axes) for name, axes in TABLE[type(node)].items()))

    return jax.tree.map(of, tree, is_leaf=lambda node: type(node) in TABLE)


def _leaf(function: Callable[[Any, Axes], Any], part: Any, axes: Axes) -> Any:
    """A field of a record; what an optimizer keeps in its place may be none, or of another shape."""
    return jax.tree.map(lambda leaf: function(leaf, axes if leaf.ndim == len(axes) else ()), part)


def check_parts(rows: Sequence[Layer], parts: int) -> None:
    """Checks that vocabularies can be divided.

    Args:
      rows: of a model.
      parts: into which each vocabulary is to be divided.

    Raises:
      InputError: one of them is no multiple of it.

    Example:
      >>> import mp_lstm
      >>> check_parts(mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=1).rows, parts=2)
    """

    def check(name: str, leaf: Any, axes: Axes) -> None:
        for size, axis in zip(leaf.shape, axes, strict=False):
            if axis == AXIS and size % parts:
                below = size // parts * parts
                raise InputError(
                    f"{name}: model_parallel is {parts}, which does not divide a vocabulary of {size}: make it {below} "
                    f"or {below + parts} (data.vocab_limit in a configuration)"
                )

    for row in rows if parts > 1 else ():
        shapes = jax.eval_shape(row.init, jax.random.key(0))
        map_with_axes(lambda leaf, axes, row=row: check(row.name, leaf, axes), shapes)
