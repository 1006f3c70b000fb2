"""Bucket lengths: the best ones against brute force, and the policies for long sentences."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import best_buckets, check_buckets, fit_buckets, length_histogram, piece_histogram
from mp_lstm.data.buckets import best_up_to
from mp_lstm.errors import InputError

some_lengths = st.lists(st.integers(1, 14), min_size=1, max_size=40)


def padded(lengths, buckets):
    return sum(min(bucket for bucket in buckets if bucket >= length) for length in lengths)


@given(some_lengths)
def test_a_histogram_counts_every_sentence(lengths):
    histogram = length_histogram(lengths)
    assert np.repeat(histogram.lengths, histogram.counts).tolist() == sorted(lengths)
    assert (histogram.sentences, histogram.tokens, histogram.longest) == (len(lengths), sum(lengths), max(lengths))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_a_drawn_histogram_is_short_and_complete(lengths):
    lines = str(length_histogram(lengths)).splitlines()
    assert len(lines) <= 13
    assert sum(int(line.split()[1].replace(",", "")) for line in lines[1:]) == len(lengths)


@given(some_lengths, st.integers(1, 5))
def test_no_other_k_buckets_waste_less(lengths, k):
    histogram = length_histogram(lengths)
    distinct = sorted(set(lengths))
    choices = ((*rest, distinct[-1]) for rest in combinations(distinct[:-1], min(k, len(distinct)) - 1))
    least = min(padded(lengths, buckets) for buckets in choices)
    found = best_buckets(histogram, k)
    assert padded(lengths, found) == least
    assert len(found) == min(k, len(distinct))


@given(some_lengths)
def test_story_17_the_buckets_cover_the_longest_sentence(lengths):
    """The example's generated buckets could miss the longest length, and those sentences were lost."""
    for buckets in best_up_to(length_histogram(lengths), 6):
        assert buckets[-1] == max(lengths)
        assert list(buckets) == sorted(set(buckets))


def test_thousands_of_different_lengths_are_no_problem():
    lengths = np.arange(1, 2001)
    assert best_buckets(length_histogram(lengths), 4) == (500, 1000, 1500, 2000)


@given(some_lengths, st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_extend_adds_the_best_two_for_long_sentences(lengths, buckets):
    histogram = length_histogram(lengths)
    fitted = fit_buckets(histogram, buckets)
    long = [length for length in lengths if length > max(buckets)]
    added = best_buckets(length_histogram(long), 2) if long else ()
    assert tuple(length for length in fitted if length > max(buckets)) == added
    assert fitted[-1] >= max(lengths)


@given(some_lengths, st.lists(st.integers(1, 16), min_size=1, max_size=4), st.sampled_from(["extend", "split"]))
def test_pitfall_8_no_bucket_is_empty(lengths, buckets, policy):
    """Empty buckets raised IndexError in others."""
    longest = max(buckets) if policy == "split" else 99
    pieces = [min(longest, length - start) for length in lengths for start in range(0, length, longest)]
    fitted = fit_buckets(length_histogram(lengths), buckets, policy)
    used = {min(bucket for bucket in fitted if bucket >= piece) for piece in pieces}
    assert used == set(fitted)


@given(some_lengths, st.integers(1, 16))
def test_pieces_have_the_tokens_of_their_sentences(lengths, longest):
    pieces = [min(longest, length - start) for length in lengths for start in range(0, length, longest)]
    found = piece_histogram(length_histogram(lengths), longest)
    assert np.repeat(found.lengths, found.counts).tolist() == sorted(pieces)


def test_drop_keeps_the_buckets_that_remain_in_use():
    assert fit_buckets(length_histogram([2, 7, 30]), [4, 8, 16], "drop") == (4, 8)


def test_story_18_the_callers_list_is_not_sorted_in_place():
    """The example sorted and reversed the lists it was given."""
    buckets = [16, 4, 8, 4]
    assert fit_buckets(length_histogram([3, 5, 15]), buckets) == (4, 8, 16)
    assert buckets == [16, 4, 8, 4]


@pytest.mark.parametrize("buckets", [[0], [8, -1], [8.5], ["8"], "auto"])
def test_refuses_buckets_that_are_no_lengths(buckets):
    with pytest.raises(InputError, match=r"a bucket is .*, wanted an integer of at least 1"):
        check_buckets(buckets)


def test_refuses_an_empty_list():
    with pytest.raises(InputError, match=r"buckets is empty.*pass e.g. \(8, 16, 32\) or 'auto'"):
        check_buckets([])


def test_refuses_an_unknown_policy():
    with pytest.raises(InputError, match=r"long sentences is 'cut': pass one of extend, split, drop"):
        fit_buckets(length_histogram([3]), [4], "cut")


def test_refuses_to_drop_everything():
    with pytest.raises(InputError, match=r"all 2 sentences are longer than the last bucket, 4.*longest sentence has 9"):
        fit_buckets(length_histogram([5, 9]), [4], "drop")


def test_refuses_no_buckets_at_all():
    with pytest.raises(InputError, match="the number of buckets is 0, wanted an integer of at least 1"):
        best_buckets(length_histogram([3]), 0)


def test_story_19_no_sentences_are_a_clear_error():
    """The example divided by zero."""
    with pytest.raises(InputError, match="there are no sentences to batch"):
        length_histogram([])


def test_refuses_a_sentence_without_steps():
    with pytest.raises(InputError, match="sentence 1 has no steps"):
        length_histogram([3, 0])
