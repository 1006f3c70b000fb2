"""The balanced partition against brute force, and the messages for partitions given by hand."""

import re
import time
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.errors import InputError
from mp_lstm.planning import balanced, check_partition
from mp_lstm.planning.partition import even, least, neighbours, splits


def all_partitions(rows, stages):
    for cuts in combinations(range(1, rows), stages - 1):
        yield tuple(np.diff((0, *cuts, rows)).tolist())


def stage_costs(costs, partition):
    ends = np.cumsum((0, *partition))
    return [sum(costs[first:last]) for first, last in pairwise(ends)]


def badness(costs, partition):
    """The contract of `balanced`: least largest stage, then most even, then the shortest last stages."""
    loads = stage_costs(costs, partition)
    return max(loads), sum(load**2 for load in loads), partition[::-1]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=10).filter(any), st.integers(1, 4))
def test_is_the_best_of_all_partitions(costs, stages):
    stages = min(stages, len(costs))
    best = min(all_partitions(len(costs), stages), key=lambda partition: badness(costs, partition))
    assert balanced(costs, stages) == best


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=10), st.integers(1, 4))
def test_largest_stage_is_least_for_any_floats(costs, stages):
    stages = min(stages, len(costs))
    least = min(max(stage_costs(costs, partition)) for partition in all_partitions(len(costs), stages))
    assert max(stage_costs(costs, balanced(costs, stages))) == pytest.approx(least, rel=1e-9)


def test_equal_costs_give_an_even_partition_whatever_their_rounding():
    for cost in (1, 0.1, 25_231_000_123.0, 0):
        assert balanced([cost] * 10, 4) == even(10, 4) == (3, 3, 2, 2)


def test_does_not_depend_on_the_unit_of_cost():
    costs = [1, 7, 3, 3, 9, 1, 1, 1]
    assert balanced(costs, 3) == balanced([cost * 1e15 / 3 for cost in costs], 3)


def test_thousand_rows_in_64_stages_take_seconds():
    begin = time.process_time()
    partition = balanced([1 + i % 7 for i in range(1000)], 64)
    assert time.process_time() - begin < 5
    assert (len(partition), sum(partition)) == (64, 1000)


def test_partition_of_numpy_ints_becomes_ints():
    partition = check_partition(np.array([2, 3]), 5)
    assert partition == (2, 3)
    assert {type(size) for size in partition} == {int}


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ((5, 4), "partition gives 9 layers (5+4), the model has 10: pass partition=(5, 5) or 'auto'"),
        ((10, 0), "partition gives stage 1 0 layers, wanted at least 1: pass partition=(5, 5) or 'auto'"),
        ((), "partition is empty, the model has 10 layers: pass partition=(10,) or 'auto'"),
        ("even", "partition is 'even', wanted the number of layers of each stage: pass a tuple of integers or 'auto'"),
        ((5.0, 5.0), "partition is (5.0, 5.0), wanted the number of layers of each stage"),
        ((1,) * 11, "11 stages for a model of 10 placement rows: pass at most stages=10"),
    ],
)
def test_wrong_partition_is_explained(partition, message):
    with pytest.raises(InputError, match=re.escape(message)):
        check_partition(partition, 10)


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [
        ([1, 1], 3, "3 stages for a model of 2 placement rows: pass at most stages=2"),
        ([1, 1], 0, "stages is 0, wanted at least 1: pass stages=1 for one device"),
        ([1, -2], 1, "cost of row 1 is -2.0, wanted finite and not negative: check its layer's cost"),
        ([float("nan"), 1], 1, "cost of row 0 is nan"),
    ],
)
def test_what_cannot_be_balanced_is_explained(costs, stages, message):
    with pytest.raises(InputError, match=re.escape(message)):
        balanced(costs, stages)


def test_least_is_the_best_of_all_partitions_for_unequal_stages():
    costs, rates = np.array([3.0, 1, 4, 1, 5, 9, 2, 6]), (1.0, 2.0, 0.5)
    sums = np.concatenate([[0], costs.cumsum()])
    loads = np.where(np.arange(8)[:, None] < np.arange(9), sums - sums[:-1, None], np.inf)
    partition, largest = least(lambda stage: loads * rates[stage], 3)

    def worst(partition):
        return max(load * rate for load, rate in zip(stage_costs(costs, partition), rates, strict=True))

    assert largest == worst(partition) == min(map(worst, all_partitions(8, 3)))


def test_least_of_what_cannot_be_is_infinite():
    assert least(lambda stage: np.full((3, 4), np.inf), 2)[1] == np.inf


@pytest.mark.parametrize(("rows", "stages"), [(1, 1), (5, 1), (5, 5), (7, 3)])
def test_splits_are_all_partitions(rows, stages):
    made = [tuple(partition) for partition in np.diff(splits(rows, stages), axis=1).tolist()]
    assert sorted(made) == sorted(all_partitions(rows, stages))


def test_neighbours_move_one_row():
    assert neighbours(np.array([0, 2, 3, 6])).tolist() == [[0, 1, 3, 6], [0, 2, 4, 6]]
    assert len(neighbours(np.array([0, 4]))) == 0
