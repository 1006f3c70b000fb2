"""The order of an epoch: every row once, in batches of one bucket, and the same for ever."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data.order import epoch_order, seeded

BUCKETS = (4, 8, 12)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(1, 7), st.integers(0, 3), st.integers(0, 3))
def test_every_row_once_in_batches_of_one_bucket(lengths, batch_size, seed, epoch):
    order = epoch_order(np.array(lengths), BUCKETS, batch_size, seeded(seed, epoch))
    empty = len(lengths)
    assert sorted(order.rows[order.rows < empty].tolist()) == list(range(empty))
    for rows, length in zip(order.rows, order.lengths, strict=True):
        assert all(length - 4 < lengths[row] <= length for row in rows if row < empty)
        assert rows[0] < empty  # no batch is all padding
    for bucket in BUCKETS:
        in_bucket = sum(bucket - 4 < length <= bucket for length in lengths)
        assert np.count_nonzero(order.lengths == bucket) == -(-in_bucket // batch_size)


def test_unshuffled_rows_keep_their_order():
    order = epoch_order(np.array([12, 3, 5, 4, 1]), BUCKETS, 2, np.arange)
    assert order.rows.tolist() == [[1, 3], [4, 5], [2, 5], [0, 5]]
    assert order.lengths.tolist() == [4, 4, 8, 12]


def test_permutations_are_the_same_on_every_machine():
    """If this fails, runs that an older version began can no longer be resumed exactly."""
    permutations = seeded(1, 2)
    assert permutations(8).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]
    assert permutations(8).tolist() == [7, 6, 1, 5, 2, 0, 4, 3]
