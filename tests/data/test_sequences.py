"""Sequences of any features: joined, gathered, refused where they do not agree."""

from typing import NamedTuple

import numpy as np
import pytest

from mp_lstm.data import join_sequences
from mp_lstm.data.sequences import gather, leaves, map_tree
from mp_lstm.errors import InputError


class Pair(NamedTuple):
    first: object
    second: object


def test_trees_of_all_kinds_are_walked():
    tree = {"a": [1, (2, None)], "b": Pair(3, {"c": 4})}
    assert leaves(tree) == [1, 2, 3, 4]
    assert map_tree(lambda x, y: x * y, tree, tree) == {"a": [1, (4, None)], "b": Pair(9, {"c": 16})}
    assert isinstance(map_tree(str, tree)["b"], Pair)


def test_joins_any_structure():
    inputs = [{"audio": np.full((t, 2, 3), t), "speaker": np.full(t, -t)} for t in (2, 3)]
    found = join_sequences(inputs, [np.full((t, 4), t) for t in (2, 3)])
    assert found.inputs["audio"].shape == (5, 2, 3)
    assert found.inputs["speaker"].tolist() == [-2, -2, -3, -3, -3]
    assert found.targets.shape == (5, 4)
    assert found.offsets.tolist() == [0, 2, 5]


def test_gathered_rows_are_padded_with_zeros_also_where_data_is_not_finite():
    batch = gather(np.full((6, 2), np.nan, np.float32), np.arange(6), np.array([1, 0, 4]), np.array([3, 0, 2]), 4)
    assert batch.inputs.shape == (4, 3, 2)
    assert batch.inputs.dtype == np.float32
    assert np.isnan(batch.inputs).all(axis=2).T.tolist() == [
        [True, True, True, False],
        [False, False, False, False],
        [True, True, False, False],
    ]
    assert batch.targets.T.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [4, 5, 0, 0]]
    assert np.isfinite(batch.inputs[batch.lengths[2] :, 2]).all()


def steps(*lengths):
    return [np.zeros((t, 2)) for t in lengths]


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        ([], [], "got 0 inputs and 0 targets"),
        (steps(2, 3), steps(2), "got 2 inputs and 1 targets"),
        (steps(2, 3), steps(2, 4), r"sequence 1 has arrays of shapes \(3, 2\), \(4, 2\)"),
        (steps(2, 0), steps(2, 0), r"sequence 1 has arrays of shapes \(0, 2\).*at least 1"),
        ([np.zeros(2), np.array(1.0)], steps(2, 2), r"sequence 1 has arrays of shapes \(\), \(2, 2\)"),
        ([np.zeros(2), np.zeros((2, 3))], steps(2, 2), r"sequence 1 has steps of .*\[3\].*, sequence 0 of .*\[\]"),
        ([np.zeros(2), {"a": np.zeros(2)}], steps(2, 2), r"sequence 1 has steps of .*\{'a'"),
        ([np.zeros(2), np.zeros(2, int)], steps(2, 2), r"sequence 1 has steps of .*int64"),
    ],
)
def test_refuses_sequences_that_do_not_agree(inputs, targets, message):
    with pytest.raises(InputError, match=message):
        join_sequences(inputs, targets)
