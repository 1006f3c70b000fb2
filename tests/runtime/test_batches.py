"""Batches cut into units and placed: what goes where, what it is divided by, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import examples
import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.runtime.batches import PlacedWindow

ROWS = 5


@pytest.fixture(scope="module")
def pipe() -> mp_lstm.Pipeline:
    """Buckets 2 and 5 in chunks of 2, five rows in micro-batches of 3 and 2; nothing is compiled here."""
    model = mp_lstm.language_model(**examples.SIZES | {"vocab": 60})
    devices = [jax.devices()[device] for device in (3, 1)]
    return examples.pipeline(model, batch_size=ROWS, lengths=(2, 5), devices=devices, stages=2, chunk=2, microbatches=2)


@pytest.fixture(scope="module")
def dense() -> mp_lstm.Pipeline:
    """The same for features, and targets of any shape."""
    model = mp_lstm.sequential([mp_lstm.lstm_layer(2, 3), mp_lstm.dense(3, 2)], loss=mp_lstm.squared_error)
    return examples.pipeline(model, batch_size=ROWS, lengths=(2, 5), chunk=2, microbatches=2)


def numbered(time: int, rows: int, **fields: Any) -> mp_lstm.Batch:
    """Tokens 10 t + b, targets one more."""
    tokens = 10 * np.arange(time)[:, None] + np.arange(rows)[None, :]
    return mp_lstm.Batch(tokens, tokens + 1, **fields)


def test_units_cover_the_batch(pipe: mp_lstm.Pipeline) -> None:
    batch = numbered(5, ROWS)
    (placed,) = pipe.place(batch).batches
    assert placed.splits == ((0, 3), (3, 5))
    assert (placed.shape.chunk, placed.shape.rows) == (2, 3)
    for units, wanted in ((placed.inputs, batch.inputs), (placed.targets, batch.targets)):
        whole = [np.concatenate(chunks) for chunks in units]
        assert [piece.shape for piece in whole] == [(6, 3), (6, 3)]
        assert (whole[0][:5] == wanted[:, :3]).all()
        assert (whole[1][:5, :2] == wanted[:, 3:]).all()
        assert (whole[0][5] == 0).all()
        assert (whole[1][:, 2] == 0).all()
    assert [[lengths.tolist() for lengths in stage] for stage in placed.lengths] == [[[5, 5, 5], [5, 5, 0]]] * 2
    weights = [np.concatenate(chunks) for chunks in placed.weights]
    assert [piece.sum() for piece in weights] == [15, 10]


def test_each_part_is_where_it_is_needed(pipe: mp_lstm.Pipeline) -> None:
    first, last = pipe.plan.devices
    (placed,) = pipe.place(numbered(5, ROWS, resets=np.ones(ROWS, bool))).batches

    def devices(tree: Any) -> set[Any]:
        return {device for leaf in jax.tree.leaves(tree) for device in leaf.devices() if leaf.committed}

    assert devices(placed.inputs) == {first}
    assert devices((placed.targets, placed.weights)) == {last}
    assert placed.resets is not None
    for stage, device in enumerate((first, last)):
        assert devices((placed.lengths[stage], placed.resets[stage])) == {device}


def test_whole_batches_need_no_lengths() -> None:
    model = mp_lstm.language_model(**examples.SIZES | {"vocab": 60})
    pipe = examples.pipeline(model, batch_size=4, lengths=(4,), stages=2, chunk=2, microbatches=2)
    (placed,) = pipe.place(numbered(4, 4)).batches
    assert placed.lengths == [[None, None], [None, None]]
    (short,) = pipe.place(numbered(3, 4)).batches
    assert [lengths.tolist() for lengths in short.lengths[0] if lengths is not None] == [[3, 3]] * 2


def test_a_batch_takes_the_smallest_bucket_that_holds_it(pipe: mp_lstm.Pipeline) -> None:
    window = pipe.place([numbered(time, ROWS) for time in (1, 2, 3, 5)])
    assert window.lengths == (2, 2, 5, 5)
    assert [len(batch.inputs[0]) for batch in window.batches] == [1, 1, 3, 3]


def test_what_sums_are_divided_by(pipe: mp_lstm.Pipeline) -> None:
    """Padding, steps of weight zero and empty rows count nowhere."""
    weights = np.ones((5, 3))
    weights[:, 1] = 0.0
    weights[2, 0] = 0.5
    batches = [
        numbered(5, 3, weights=weights, lengths=np.array([4, 5, 0])),
        numbered(2, 2, lengths=np.array([2, 1])),
    ]
    tokens = pipe.place(batches)
    assert (tokens.weight, tokens.tokens) == (3.5 + 3, 4 + 3)
    assert [float(denominator) for denominator in tokens.denominators] == [6.5, 6.5]
    rows = mp_lstm.make_pipeline(pipe.model, pipe.plan, examples.recorder(), normalize="rows").place(batches)
    assert [float(denominator) for denominator in rows.denominators] == [3, 3]
    assert float(rows.weight_scalar) == 6.5


def test_a_window_without_weight_is_divided_by_one(pipe: mp_lstm.Pipeline) -> None:
    window = pipe.place(numbered(2, 3, lengths=np.zeros(3, int)))
    assert (window.weight, window.tokens, float(window.weight_scalar), float(window.denominators[0])) == (0, 0, 1, 1)


def test_batches_are_copied_and_left_alone(pipe: mp_lstm.Pipeline) -> None:
    """A device may alias what it was given for as long as it likes, so a caller's buffer must not be its memory."""
    batch = numbered(5, ROWS, lengths=np.array([5, 0, 1, 2, 5]))
    before = jax.tree.map(np.copy, batch)
    window = pipe.place(batch)
    jax.tree.map(np.testing.assert_array_equal, batch, before)
    placed = [np.array(unit) for unit in jax.tree.leaves(window.batches[0].inputs)]
    batch.inputs[...] = -7
    batch.targets[...] = -7
    for unit, was in zip(jax.tree.leaves(window.batches[0].inputs), placed, strict=True):
        np.testing.assert_array_equal(unit, was)


def test_features_on_padding_are_zeroed_before_they_are_sent(dense: mp_lstm.Pipeline) -> None:
    """Masked or not, NaN times zero is NaN. Targets were sent as they were, and made loss and gradients NaN."""
    frames = np.full((5, ROWS, 2), np.nan, np.float32)
    frames[:2] = 1.0
    (placed,) = dense.place(mp_lstm.Batch({"x": frames}, {"y": frames}, lengths=np.full(ROWS, 2))).batches
    assert all(np.isfinite(unit).all() for unit in jax.tree.leaves((placed.inputs, placed.targets)))


def test_targets_without_weight_are_zeroed_before_they_are_sent(dense: mp_lstm.Pipeline) -> None:
    """On real steps too, whose inputs are read nevertheless."""
    targets, weights = np.ones((5, ROWS, 2), np.float32), np.ones((5, ROWS))
    targets[3, 1], weights[3, 1] = np.nan, 0
    (placed,) = dense.place(mp_lstm.Batch(np.ones((5, ROWS, 2)), targets, weights)).batches
    whole = np.concatenate(placed.targets[0])
    assert whole[3, 1].tolist() == [0, 0]
    assert whole[:5].sum() == 2 * (5 * 3 - 1)
    assert np.concatenate(placed.inputs[0])[:5].all()


def test_resets_may_be_numbers(pipe: mp_lstm.Pipeline) -> None:
    """Programs are for booleans: after those, numbers were refused by a compiled program."""
    resets: Any
    for resets in (np.array([1, 0, 1, 0, 0]), np.array([1.0, 0, 1, 0, 0]), [True, False, True, False, False]):
        (placed,) = pipe.place(numbered(5, 5, resets=resets)).batches
        assert placed.resets is not None
        assert placed.resets[0].dtype == bool
        assert placed.resets[0].tolist() == [True, False, True, False, False]


def test_rows_of_padding_reset_their_state(pipe: mp_lstm.Pipeline) -> None:
    (placed,) = pipe.place(numbered(5, 3, resets=np.zeros(3, bool))).batches
    assert placed.resets is not None
    assert placed.resets[0].tolist() == [False] * 3 + [True] * 2


def test_what_programs_depend_on(pipe: mp_lstm.Pipeline, dense: mp_lstm.Pipeline) -> None:
    """Buckets of one chunk share programs; lengths or other features take programs of their own."""

    def shape(batch: mp_lstm.Batch, pipe: mp_lstm.Pipeline = pipe) -> Any:
        return pipe.place(batch).batches[0].shape

    assert shape(numbered(2, ROWS)) == shape(numbered(5, ROWS)) == shape(numbered(5, ROWS, lengths=np.full(ROWS, 3)))
    frames = mp_lstm.Batch(np.ones((5, ROWS, 2), np.float32), np.ones((5, ROWS), int))
    assert shape(frames, dense) != shape(frames._replace(inputs=np.ones((5, ROWS, 3), np.float32)), dense)


@pytest.mark.parametrize(
    ("window", "got"),
    [
        ((np.zeros((5, 5), int), np.ones((5, 5), int)), "ndarray"),
        (np.zeros((5, 5), int), "ndarray"),
        (None, "NoneType"),
        ("batches", "str"),
        ([numbered(5, 5), None], "NoneType"),
    ],
)
def test_refuses_what_is_no_window_of_batches(pipe: mp_lstm.Pipeline, window: Any, got: str) -> None:
    """Tuples of arrays, as other libraries have them, ended in tracebacks."""
    with pytest.raises(InputError, match=rf"got a {got} for a batch: pass mp_lstm.Batch\(inputs, targets\)"):
        pipe.place(window)


def test_ids_that_the_model_does_not_know_are_refused(pipe: mp_lstm.Pipeline) -> None:
    """They were clipped or wrapped: a target of -1 trained towards the last word."""
    batch = numbered(5, 5)
    batch.targets[4, 2] = -1
    with pytest.raises(InputError, match=r"batch.targets has id -1 at step 4 of row 2, head knows 0 to 59: .*weight 0"):
        pipe.place(batch)
    weights = np.ones((5, 5))
    weights[4, 2] = 0
    (placed,) = pipe.place(batch._replace(weights=weights)).batches
    assert np.concatenate(placed.targets[0])[4, 2] == 0


def test_a_placed_window_is_placed(pipe: mp_lstm.Pipeline) -> None:
    window = pipe.place(numbered(2, ROWS))
    assert isinstance(window, PlacedWindow)
    assert pipe.place(window) is window


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "the window has no batch, at least one is wanted"),
        (numbered(5, 6), "the batch has 6 rows, the plan is for 5: pass batch_size=6 to make_plan"),
        (numbered(6, 5), "length 6 fits no bucket, the longest is 5"),
        (
            numbered(5, 5)._replace(targets=np.zeros((4, 5), int)),
            r"batch.targets has shape \(4, 5\), its first axes must be T=5, B=5",
        ),
        (
            numbered(5, 5, weights=np.ones((5, 1))),
            r"batch.weights has shape \(5, 1\), one value for each of the 5 steps of 5 rows is wanted",
        ),
        (
            numbered(5, 5, lengths=np.ones(4, int)),
            r"batch.lengths has shape \(4,\), one value for each of the 5 rows is wanted",
        ),
        (
            numbered(5, 5, resets=np.ones((5, 1), bool)),
            r"batch.resets has shape \(5, 1\), one value for each of the 5 rows is wanted",
        ),
        (
            numbered(5, 5, lengths=np.array([0, 1, 2, 3, 6])),
            r"batch.lengths lie in 0..6, 0..5 \(T of the inputs\) is wanted",
        ),
        (
            numbered(5, 5, lengths=np.array([0, -1, 2, 3, 5])),
            r"batch.lengths lie in -1..5, 0..5 \(T of the inputs\) is wanted",
        ),
    ],
)
def test_refuses_shapes_that_do_not_agree(pipe: mp_lstm.Pipeline, batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipe.place(batch)
