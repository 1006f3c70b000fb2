"""What a batch must be: what is refused, with which words, and what is none of a check's business."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.layers.base import Context
from mp_lstm.layers.checks import checked

TIME, ROWS, VOCAB = 3, 2, 11
MODEL = mp_lstm.language_model(vocab=VOCAB, embed=3, hidden=4, layers=1)
FEATURES = mp_lstm.sequential([mp_lstm.lstm_layer(2, 3), mp_lstm.dense(3, 2)], loss=mp_lstm.squared_error)
IDS = np.arange(TIME * ROWS).reshape(TIME, ROWS)


def batch(**fields: Any) -> mp_lstm.Batch:
    return mp_lstm.Batch(**{"inputs": IDS, "targets": IDS} | fields)


def with_id(value: int) -> np.ndarray:
    """Ids of which one, at step 2 of row 1, is another."""
    ids = IDS.copy()
    ids[2, 1] = value
    return ids


WHOLE = r"whole numbers \[T, B\] are wanted: {} takes ids"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((IDS, IDS), "got a tuple for a batch: pass"),
        (None, "got a NoneType for a batch: pass"),
        (batch(inputs=None), r"batch.inputs has no array, \[T, B, ...\] is wanted: pass arrays"),
        (batch(inputs=IDS.tolist()), r"batch.inputs has shape \(\), .* and no lists"),
        (batch(inputs=IDS[:, 0]), r"batch.inputs has shape \(3,\), \[T, B, ...\] is wanted"),
        (batch(inputs=np.array(["a"])), "batch.inputs has values of type <U1, numbers are wanted"),
        (batch(targets=IDS.tolist()), r"batch.targets has shape \(\), its first axes must be T=3, B=2"),
        (batch(weights=[[1.0], [1.0, 2.0], []]), r"batch.weights is no array \(.*\): pass a numpy array"),
        (batch(weights=np.ones((3, 2, 1))), r"batch.weights has shape \(3, 2, 1\), one value for each of the 3 steps"),
        (batch(lengths=np.ones((3,), int)), r"batch.lengths has shape \(3,\), one value for each of the 2 rows"),
        (batch(lengths=3), r"batch.lengths has shape \(\), one value for each of the 2 rows"),
        (batch(lengths=[4, 1]), r"batch.lengths lie in 1..4, 0..3 \(T of the inputs\) is wanted"),
        (batch(lengths=[2.5, 1.0]), "batch.lengths has values of type float64, whole numbers of steps are wanted"),
        (batch(lengths=[True, True]), "batch.lengths has values of type bool, whole numbers of steps are wanted"),
        (batch(resets=[[True], [False]]), r"batch.resets has shape \(2, 1\), one value for each of the 2 rows"),
        (batch(inputs=IDS.astype(float)), r"batch.inputs is float64 \[3, 2\], " + WHOLE.format("embed")),
        (batch(inputs=IDS > 1), r"batch.inputs is bool \[3, 2\], " + WHOLE.format("embed")),
        (batch(inputs=IDS[:, :, None]), r"batch.inputs is int64 \[3, 2, 1\], " + WHOLE.format("embed")),
        (batch(inputs={"ids": IDS}), "batch.inputs is a dict, " + WHOLE.format("embed")),
        (batch(targets=IDS.astype(np.float32)), r"batch.targets is float32 \[3, 2\], " + WHOLE.format("head")),
        (batch(targets=IDS[:, :, None]), r"batch.targets is int64 \[3, 2, 1\], " + WHOLE.format("head")),
        (batch(targets=None), "batch.targets is None, " + WHOLE.format("head")),
        (batch(inputs=with_id(11)), "batch.inputs has id 11 at step 2 of row 1, embed knows 0 to 10: make .* vocab"),
        (batch(inputs=with_id(-1)), "batch.inputs has id -1 at step 2 of row 1, embed knows 0 to 10"),
        (batch(inputs=with_id(2**32)), "batch.inputs has id 4294967296 at step 2 of row 1"),
        (batch(targets=with_id(11)), "batch.targets has id 11 at step 2 of row 1, head knows 0 to 10: .* weight 0"),
        (batch(targets=with_id(-1)), "batch.targets has id -1 at step 2 of row 1, head knows 0 to 10"),
    ],
)
def test_refuses(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(MODEL.rows, given)


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_refuses_weights_that_are_none(weight: float) -> None:
    """Negative ones made loss and gradient negative; together with others they summed to 0, which divided by 1."""
    weights = np.ones((TIME, ROWS))
    weights[2, 1] = weight
    with pytest.raises(InputError, match=rf"batch.weights has {weight} at step 2 of row 1, finite .* weight 0"):
        checked(MODEL.rows, batch(weights=weights))
    checked(MODEL.rows, batch(weights=weights, lengths=[3, 2]))


@pytest.mark.parametrize(("weight", "total"), [(1e38, "6e+38"), (1e308, "inf"), (1e18, "6e+18")])
def test_refuses_weights_whose_sum_is_too_large(weight: float, total: str) -> None:
    """The loss was not a number, or from 1e18 on the gradient's norm was infinite and nothing was trained."""
    weights = np.full((TIME, ROWS), weight)
    with pytest.raises(
        InputError, match=rf"batch.weights sum to {re.escape(total)}, at most 1.2e\+18 is wanted, .* divide"
    ):
        checked(MODEL.rows, batch(weights=weights))
    checked(MODEL.rows, batch(weights=weights / weight))
    checked(MODEL.rows, batch(weights=weights, lengths=[0, 0]))


def test_what_is_not_read_may_be_anything() -> None:
    """Padding, and targets of steps without weight, whose inputs are read nevertheless."""
    weights = np.ones((TIME, ROWS))
    weights[2, 1] = 0
    checked(MODEL.rows, batch(inputs=with_id(99), targets=with_id(-1), lengths=[3, 2]))
    checked(MODEL.rows, batch(targets=with_id(-1), weights=weights))
    checked(MODEL.rows, batch(targets=None), targets=False)
    with pytest.raises(InputError, match=r"batch.inputs has id 99"):
        checked(MODEL.rows, batch(inputs=with_id(99), weights=weights))


def test_values_on_devices_are_not_waited_for() -> None:
    """Nor can they be, of traced arrays; shapes and types are known of both."""
    jax.eval_shape(
        lambda given: checked(MODEL.rows, given).inputs, batch(weights=np.ones((TIME, ROWS)), lengths=IDS[0])
    )
    checked(MODEL.rows, batch(inputs=jnp.asarray(with_id(99)), targets=jnp.asarray(with_id(-1))))
    checked(MODEL.rows, batch(targets=with_id(99), lengths=jnp.array([3, 2]), weights=-jnp.ones((TIME, ROWS))))
    with pytest.raises(InputError, match=r"batch.inputs is float32 \[3, 2\]"):
        checked(MODEL.rows, batch(inputs=jnp.ones((TIME, ROWS))))


def test_lists_of_numbers_are_arrays() -> None:
    given = checked(MODEL.rows, batch(weights=[[1, 0]] * TIME, lengths=[1, 2], resets=[1, 0]))
    assert [value.tolist() for value in (given.weights, given.lengths, given.resets)] == [[[1, 0]] * 3, [1, 2], [1, 0]]


def test_the_loss_of_a_model_is_checked() -> None:
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), jax.eval_shape(MODEL.init, jax.random.key(0)))
    with pytest.raises(InputError, match=r"batch.targets has id 11 at step 2 of row 1"):
        MODEL.loss(params, batch(targets=with_id(11)))


@pytest.mark.parametrize(
    "layer",
    [mp_lstm.lstm_layer(5, 4, name="mine"), mp_lstm.dense(5, 4, name="mine"), mp_lstm.softmax_head(5, 4, name="mine")],
)
@pytest.mark.parametrize("shape", [(TIME, ROWS, 4), (TIME, ROWS), (TIME, ROWS, 5, 1)])
def test_a_layer_names_itself_where_its_input_has_another_size(layer: mp_lstm.Layer, shape: tuple[int, ...]) -> None:
    params, state = layer.init(jax.random.key(0)), layer.init_state(ROWS)
    with pytest.raises(InputError, match=r"mine: its input is float32 .*, \[T, B, 5\] is wanted: make the layer with"):
        layer.infer(params, jnp.ones(shape), state, Context())


def test_chains_pass_on_what_their_ids_may_be() -> None:
    both = mp_lstm.chain(MODEL.rows)
    assert (both.input_ids, both.target_ids) == (VOCAB, VOCAB)
    assert [(row.input_ids, row.target_ids) for row in FEATURES.rows] == [(None, None)] * 2


def test_shapes_that_do_not_fit_an_lstm() -> None:
    """These were errors of matrix products and broadcasting, deep in the scan."""
    params = mp_lstm.lstm_init(jax.random.key(0), 3, 5)
    with pytest.raises(InputError, match=r"lstm: its input is float32 \[4, 2, 6\], \[T, B, 3\] is wanted"):
        mp_lstm.lstm(params, jnp.ones((4, 2, 6)))
    with pytest.raises(InputError, match=r"lstm: lengths are int32 \[3\], whole numbers of steps \[2\]"):
        mp_lstm.lstm(params, jnp.ones((4, 2, 3)), lengths=jnp.array([1, 2, 3]))


@pytest.mark.parametrize(("time", "rows"), [(0, 2), (3, 0)])
def test_an_lstm_of_no_step_or_no_row(time: int, rows: int) -> None:
    """It was a division by zero."""
    before = mp_lstm.LSTMState(*jnp.ones((2, rows, 5)))
    state, y = mp_lstm.lstm(mp_lstm.lstm_init(jax.random.key(0), 3, 5), jnp.ones((time, rows, 3)), before)
    assert y.shape == (time, rows, 5)
    np.testing.assert_array_equal(state.h, before.h)
