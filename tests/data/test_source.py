"""Passing through a source, leaving and coming back."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import BatchSource, ContiguousBatches, Dropped, SentenceBatches, Split, iterate
from mp_lstm.errors import InputError

LENGTHS = [3, 9, 2, 5, 5, 7, 1, 4, 12, 3, 6]
TEXT = Split(np.arange(sum(LENGTHS), dtype=np.int32), np.cumsum([0, *LENGTHS]))
SOURCES = (SentenceBatches(TEXT, (4, 8, 12), 3, seed=5), ContiguousBatches(TEXT, 4, 3))
sources = pytest.mark.parametrize("source", SOURCES, ids=["sentences", "contiguous"])


def same(one, two):
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@sources
def test_is_a_batch_source(source):
    assert isinstance(source, BatchSource)


@given(st.sampled_from(SOURCES), st.integers(0, 20))
def test_story_13_a_position_given_back_continues_exactly(source, taken):
    """The example's iterator could not be resumed."""
    whole = list(iterate(source, epochs=3))
    taken = min(taken, len(whole))
    position = whole[taken - 1][0] if taken else (0, 0)
    rest = list(iterate(source, start=position, epochs=3))
    assert len(rest) == len(whole) - taken
    for (place, batch), (wanted_place, wanted) in zip(rest, whole[taken:], strict=True):
        assert place == wanted_place
        assert same(batch, wanted)


@sources
def test_story_19_a_second_pass_needs_no_reset(source):
    """In the example a second pass gave no batches until somebody called reset."""
    first, second = (list(iterate(source, epochs=1)) for _ in range(2))
    assert len(first) == source.num_batches() > 0
    assert all(same(one, two) for (_, one), (_, two) in zip(first, second, strict=True))


@sources
def test_positions_count_batches_and_end_at_the_next_epoch(source):
    count = source.num_batches()
    wanted = [(0, index) for index in range(1, count)] + [(1, 0)]
    assert [position for position, _ in iterate(source, epochs=1)] == wanted


@sources
def test_goes_on_for_ever_without_epochs(source):
    assert len(list(islice(iterate(source), 5 * source.num_batches()))) == 5 * source.num_batches()


@sources
def test_the_end_of_an_epoch_is_the_start_of_the_next(source):
    end = (0, source.num_batches())
    assert [position for position, _ in iterate(source, start=end, epochs=2)][-1] == (2, 0)
    assert list(iterate(source, start=end, epochs=1)) == []


@sources
def test_refuses_a_position_that_is_not_there(source):
    with pytest.raises(InputError, match=r"position is batch 99 of epoch 0, which has \d batches: continue with"):
        iterate(source, start=(0, 99))
    with pytest.raises(InputError, match="a position is -1"):
        iterate(source, start=(-1, 0))


@sources
@pytest.mark.parametrize("index", [-1, 99])
def test_a_batch_that_is_not_there_is_an_index_error(source, index):
    with pytest.raises(IndexError, match=f"batch {index} of an epoch of"):
        source.batch(0, index)


@sources
def test_batches_share_no_memory(source):
    """JAX may use a host array in place, so nothing that was handed out may be written to again."""
    arrays = [array for _ in range(2) for array in source.batch(0, 0) if array is not None]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    assert not any(np.shares_memory(a, TEXT.tokens) for a in arrays)


def test_dropped_is_printed():
    assert str(Dropped()) == "0 sentences (0 tokens) dropped"


@sources
def test_epochs_that_are_no_number_of_passes(source):
    """With -1 of them there was no batch, and nobody said so."""
    with pytest.raises(InputError, match=r"^epochs is -1, wanted an integer of at least 0"):
        iterate(source, epochs=-1)
    assert not list(iterate(source, start=(2, 0), epochs=1))  # a run that is over
