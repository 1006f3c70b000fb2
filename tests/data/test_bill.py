"""The bucket bill, counted by hand, and the number of buckets it chooses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import auto_buckets, bucket_bill, length_histogram
from mp_lstm.data.buckets import best_up_to
from mp_lstm.errors import InputError

COSTS = {"batch_size": 2, "seconds_per_token": 0.5, "compile_seconds": 3.0, "epochs": 4}


def test_counts_padding_of_rows_and_of_short_batches():
    bill = bucket_bill(length_histogram([1, 2, 2, 9]), (2, 6, 10), **COSTS)
    assert bill.buckets == (2, 6, 10)
    assert bill.sentences == (3, 0, 1)
    assert bill.batches == (2, 0, 1)
    assert bill.tokens == (5, 0, 9)
    assert bill.computed == (8, 0, 20)
    assert bill.padding == pytest.approx(14 / 28)
    assert bill.one_bucket == 4 * 9
    assert bill.seconds_saved == (36 - 28) * 0.5
    assert bill.compile_seconds == 3.0  # the empty bucket compiles nothing
    assert bill.seconds_gained == 4 * 4.0 - 3.0


def test_is_printed_as_a_table_with_its_sum():
    *rows, total, gain = str(bucket_bill(length_histogram([1, 2, 2, 9]), (2, 10), **COSTS)).splitlines()
    assert [row.split() for row in rows] == [
        ["bucket", "sentences", "batches", "tokens", "computed", "padding"],
        ["2", "3", "2", "5", "8", "37.5%"],
        ["10", "1", "1", "9", "20", "55.0%"],
    ]
    assert total.split() == ["all", "4", "3", "14", "28", "50.0%"]
    assert gain == "one bucket would waste 61.1%; saved 4.0 s an epoch, compiling +3.0 s; +13.0 s over 4 epochs"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.floats(0, 50), st.integers(1, 5))
def test_auto_takes_the_number_that_gains_most(lengths, compile_seconds, max_buckets):
    histogram = length_histogram(lengths)
    costs = COSTS | {"compile_seconds": compile_seconds}
    bills = [bucket_bill(histogram, buckets, **costs) for buckets in best_up_to(histogram, max_buckets)]
    chosen = auto_buckets(histogram, **costs, max_buckets=max_buckets)
    assert bucket_bill(histogram, chosen, **costs).seconds_gained == max(bill.seconds_gained for bill in bills)


def test_more_buckets_do_not_pay_where_batches_stay_empty():
    histogram = length_histogram([3, 4, 5, 6])
    free = COSTS | {"compile_seconds": 0.0}
    assert auto_buckets(histogram, **free | {"batch_size": 4}) == (6,)
    assert auto_buckets(histogram, **free | {"batch_size": 1}) == (3, 4, 5, 6)


def test_compiling_must_be_paid_back_within_the_run():
    histogram = length_histogram([2] * 100 + [20] * 10)
    assert auto_buckets(histogram, **COSTS) == (2, 20)
    assert auto_buckets(histogram, **COSTS | {"compile_seconds": 1e6}) == (20,)


@pytest.mark.parametrize("name", ["batch_size", "epochs", "max_buckets"])
def test_refuses_numbers_that_are_not_positive(name):
    with pytest.raises(InputError, match=f"{name} is 0, wanted an integer of at least 1"):
        auto_buckets(length_histogram([3]), **COSTS | {name: 0})


def test_refuses_buckets_that_do_not_hold_the_longest_sentence():
    with pytest.raises(InputError, match="longest sentence has 9 steps, the last bucket 8: call fit_buckets first"):
        bucket_bill(length_histogram([3, 9]), (4, 8), **COSTS)
