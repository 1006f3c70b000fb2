"""The language model's rows, initial values and messages; its mathematics is in tests/test_transparency.py."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import mp_lstm
from mp_lstm.errors import InputError

SIZES: dict[str, Any] = {"vocab": 11, "embed": 4, "hidden": 6, "layers": 2}


def parameters(model: mp_lstm.Model) -> list[int]:
    return [row.cost(1, 1).parameters for row in model.rows]


def test_rows() -> None:
    model = mp_lstm.language_model(**SIZES, dropout=0.5)
    assert [row.name for row in model.rows] == ["embed", "lstm 1", "lstm 2", "head"]
    assert [row.kind for row in model.rows] == ["embedding", "lstm", "lstm", "head"]
    assert parameters(model) == [44, (4 + 6 + 1) * 24, (6 + 6 + 1) * 24, 7 * 11]


def test_a_size_for_each_layer() -> None:
    model = mp_lstm.language_model(**SIZES | {"hidden": [6, 3]})
    assert parameters(model) == [44, (4 + 6 + 1) * 24, (6 + 3 + 1) * 12, 4 * 11]


def test_a_tied_decoder_owns_its_bias_alone() -> None:
    model = mp_lstm.language_model(**SIZES | {"hidden": [6, 4]}, tie=True)
    assert parameters(model)[-1] == 11
    assert [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))[-1])] == [(11,)]


def test_initial_values() -> None:
    model = mp_lstm.language_model(**SIZES, init_scale=0.1, forget_bias=1.0)
    params = model.init(jax.random.key(0))
    biases = [params[row].bias for row in (1, 2)]
    for bias in biases:
        input_gate, forget_gate, *_ = np.split(np.asarray(bias), 4)
        assert (abs(input_gate) <= 0.1).all()
        assert (abs(forget_gate - 1) <= 0.1).all()
    others = [params[0], *(params[row]._replace(bias=()) for row in (1, 2)), params[3]]
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(others)])
    assert 0.09 < abs(values).max() <= 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0, a whole number of at least 1 is wanted"),
        ({"hidden": [6]}, "hidden gives 1 sizes, the model has 2 layers: give one size a layer, or one number"),
        ({"hidden": 0}, "lstm 1: hidden is 0, a whole number of at least 1 is wanted"),
        ({"vocab": 0}, "embed: vocab is 0, a whole number of at least 1 is wanted"),
        ({"tie": True}, "tie: the last hidden size is 6 and embed is 4: a tied decoder needs them equal"),
        ({"residual_from": 3}, "residual_from is 3, a layer from 1 to 2 is wanted"),
        ({"init_scale": 0.0}, "init_scale is 0.0, a positive number is wanted"),
        ({"dropout": 1.0}, r"dropout: the rate is 1.0, a number in \[0, 1\) is wanted"),
        ({"unroll": 17}, "unroll is 17, 1 to 16 is wanted"),
    ],
)
def test_refuses_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mp_lstm.language_model(**SIZES | changes)
