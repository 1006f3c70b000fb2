"""The table of what lies in parts."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.sharding import TABLE, check_parts, map_with_axes

SIZES: dict[str, Any] = {"vocab": 6, "embed": 4, "hidden": 4, "layers": 1}


def axes_of(tree: Any) -> dict[str, Any]:
    """The axes of the leaves that are divided, by path."""
    found = map_with_axes(lambda leaf, axes: [leaf, axes], tree)
    leaves = jax.tree.leaves_with_path(found, is_leaf=lambda node: isinstance(node, list))
    return {jax.tree_util.keystr(path): axes for path, (_, axes) in leaves if axes}


def test_an_entry_has_every_field_in_order() -> None:
    assert all(tuple(entry) == kind._fields for kind, entry in TABLE.items())


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_of_the_vocabulary_alone(tie: bool) -> None:
    model = mp_lstm.language_model(**SIZES, tie=tie)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    head = {} if tie else {"[2].kernel": (None, "model")}
    assert axes_of(shapes) == {"[0].table": ("model", None), **head, "[2].bias": ("model",)}


def test_moments_lie_as_parameters_and_what_has_another_shape_does_not() -> None:
    model = mp_lstm.language_model(**SIZES)
    shapes = jax.eval_shape(model.init, jax.random.key(0))[2]
    assert set(axes_of(jax.eval_shape(optax.adam(0.1).init, shapes))) == {
        f"[0].{moment}.{leaf}" for moment in ("mu", "nu") for leaf in ("kernel", "bias")
    }
    factored = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=2).init, shapes)
    assert axes_of(factored) == {f".{part}.bias": ("model",) for part in ("v_row", "v_col", "v")}


def test_a_vocabulary_that_does_not_divide() -> None:
    rows = mp_lstm.language_model(**SIZES).rows
    check_parts(rows, 3)
    with pytest.raises(InputError, match=r"embed: model_parallel is 4, .* a vocabulary of 6: make it 4 or 8 "):
        check_parts(rows, 4)
