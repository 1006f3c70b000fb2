"""Costs: adding them up, and turning them into seconds."""

import pytest

from mp_lstm.planning import Cost, Rates
from mp_lstm.planning.costs import task_times, total

ROW = Cost(
    forward=100, backward=200, weight=300, parameters=7, parameter_bytes=28, activation_bytes=40, transfer_bytes=9
)
SILENT = Rates(flops_per_second=100, bytes_per_second=10, latency_seconds=0)


def test_total_adds_all_but_the_output_which_is_the_last_ones():
    assert total([ROW, ROW._replace(transfer_bytes=5)]) == Cost(200, 400, 600, 14, 56, 80, 5)


def test_total_of_nothing_is_nothing():
    assert total([]) == Cost(0, 0, 0, 0, 0, 0, 0)


def test_flops_are_those_of_all_phases():
    assert ROW.flops == 600


def test_every_forward_and_backward_reads_the_weights_again():
    """Four chunks read four times what one chunk does; W runs once over all of them."""
    unit, joined = Cost(25, 50, 75, 7, 28, 10, 9), ROW
    cut, whole = task_times(unit, joined, SILENT), task_times(joined, joined, SILENT)
    weights = 28 / 10
    for unit_seconds, joined_seconds in ((cut.F, whole.F), (cut.B, whole.B)):
        assert 4 * unit_seconds - joined_seconds == pytest.approx(3 * weights)
    assert cut.W == whole.W == pytest.approx(300 / 100 + (40 + 2 * 4 * 7) / 10)
    assert cut.U == whole.U == pytest.approx(7 * 4 * 7 / 10)


def test_each_task_is_dispatched_once():
    late = task_times(ROW, ROW, SILENT._replace(latency_seconds=2))
    assert late == pytest.approx([seconds + 2 for seconds in task_times(ROW, ROW, SILENT)])


def test_nominal_rates_are_of_the_order_of_a_cpu_core():
    rates = Rates()
    assert 1e10 < rates.flops_per_second < 1e12
    assert 1e9 < rates.bytes_per_second < 1e11
    assert 1e-6 < rates.latency_seconds < 1e-3
