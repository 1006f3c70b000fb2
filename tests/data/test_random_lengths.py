"""Random lengths: distributed as the paper has them, few, and no token lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import RandomLengthBatches, Split, iterate
from mp_lstm.errors import InputError


def source_of(tokens, length=70, batch_size=1, multiple=10, seed=0):
    return RandomLengthBatches(
        Split(np.arange(tokens, dtype=np.int32), np.array([0, tokens])), length, batch_size, multiple, seed
    )


def test_lengths_are_drawn_around_the_length_and_sometimes_around_half_of_it():
    counts = source_of(1_000_000, multiple=1).counts()
    lengths, times = np.array(list(counts)), np.array(list(counts.values()))
    short = lengths <= 50
    share = times[short].sum() / times.sum()
    assert share == pytest.approx(0.05, abs=0.008)
    for part, mean in ((short, 35), (~short, 70)):
        values = np.repeat(lengths[part], times[part])
        assert values.mean() == pytest.approx(mean, abs=0.6)
        assert values.std() == pytest.approx(5, abs=0.5)
        assert np.ptp(values) <= 30
    assert len(lengths) <= 2 * (30 // 1 + 2)


@given(
    st.integers(1, 900),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_every_token_comes_once_in_every_epoch(tokens, length, batch_size, multiple, seed, epoch):
    multiple = min(multiple, length)
    source = source_of(tokens, length, batch_size, multiple, seed)
    seen, count = [[] for _ in range(batch_size)], source.num_batches()
    for index in range(count):
        batch = source.batch(epoch, index)
        assert batch.inputs.shape[0] in source.buckets
        assert batch.inputs.shape[0] % multiple == 0
        assert batch.lengths.max() > 0
        assert batch.resets.tolist() == [index == 0] * batch_size
        for row, real in enumerate(batch.lengths):
            seen[row] += batch.targets[:real, row].tolist()
    assert [token for row in seen for token in row] == list(range(tokens))
    assert len(source.buckets) <= 2 * (30 // multiple + 2)
    assert sum(source.counts().values()) == count


def test_epochs_differ_and_a_position_gives_its_batch_back():
    source = source_of(5000)
    first, second = ([source.batch(epoch, i).inputs.shape[0] for i in range(20)] for epoch in (0, 1))
    assert first != second
    whole = list(iterate(source, epochs=2))
    position, _ = whole[70]
    for (after, batch), (again, same) in zip(
        whole[71:], iterate(source_of(5000), start=position, epochs=2), strict=True
    ):
        assert after == again
        np.testing.assert_array_equal(batch.inputs, same.inputs)
    assert [b.inputs.shape for _, b in iterate(source_of(5000, seed=1), epochs=1)] != [
        b.inputs.shape for _, b in whole[: source.num_batches()]
    ]


def test_what_is_no_multiple():
    with pytest.raises(InputError, match="multiple"):
        source_of(50, multiple=0)
    with pytest.raises(InputError, match=r"^multiple is 71, wanted at most the length, which is 70$"):
        source_of(50, multiple=71)
    with pytest.raises(IndexError):
        source_of(50).batch(0, 1)
