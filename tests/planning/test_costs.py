"""Costs: adding them up, and what the layers state."""

import pytest

import mp_lstm
from mp_lstm.planning import Cost, CostModel, default_calibration
from mp_lstm.planning.costs import total

ROW = Cost(
    forward=100,
    backward=200,
    weight=300,
    parameters=7,
    parameter_bytes=28,
    saved_bytes=40,
    transfer_bytes=9,
    kept_bytes=11,
    tape_bytes=13,
    input_bytes=17,
    step_bytes=19,
    scratch_bytes=23,
)


def test_total_adds_all_but_inputs_outputs_and_temporaries():
    both = total([ROW, ROW._replace(transfer_bytes=5, input_bytes=2, scratch_bytes=3)])
    assert both == ROW._replace(
        forward=200,
        backward=400,
        weight=600,
        parameters=14,
        parameter_bytes=56,
        saved_bytes=80,
        transfer_bytes=5,
        kept_bytes=2 * 11 + 2,
        tape_bytes=26,
        step_bytes=38,
    )


def test_total_of_nothing_is_nothing():
    assert total([]) == Cost(0, 0, 0, 0, 0, 0, 0)


def test_the_last_output_that_is_stated_is_sent():
    assert total([ROW, ROW._replace(transfer_bytes=0)]).transfer_bytes == 9


def test_sums_of_phases_and_arrays():
    assert ROW.flops == 600
    assert ROW.activation_bytes == 40 + 11 + 17


def test_arrays_of_an_lstm_are_those_that_it_makes():
    """In float32 for 2 rows and 3 steps, 5 inputs and 7 units."""
    cost = mp_lstm.lstm_layer(5, 7).cost(2, 3)
    value = 2 * 3 * 4
    assert (cost.input_bytes, cost.saved_bytes, cost.kept_bytes) == (5 * value, 5 * 7 * value, 7 * value)
    assert (cost.tape_bytes, cost.step_bytes, cost.transfer_bytes) == (4 * 7 * value, 7 * 28 * 4, 7 * value)


@pytest.mark.parametrize(
    "layer",
    [mp_lstm.lstm_layer(5, 7), mp_lstm.dense(5, 7), mp_lstm.embedding(9, 7), mp_lstm.softmax_head(5, 9)],
    ids=lambda layer: layer.kind,
)
def test_arrays_grow_with_rows_and_steps(layer):
    small, large = layer.cost(2, 3), layer.cost(4, 9)
    for name in ("saved_bytes", "kept_bytes", "tape_bytes", "input_bytes", "scratch_bytes"):
        assert getattr(large, name) == 6 * getattr(small, name)
    assert large.step_bytes == small.step_bytes


def test_the_costs_of_a_calibration_are_a_cost_model():
    model = mp_lstm.sequential([mp_lstm.dense(3, 2)])
    assert isinstance(default_calibration().costs(model), CostModel)
