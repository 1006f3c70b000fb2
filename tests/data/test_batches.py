"""Batches of sentences and of consecutive text: nothing lost, nothing doubled, eos read and predicted."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import (
    ContiguousBatches,
    SentenceBatches,
    Split,
    austen,
    batches,
    iterate,
    load_austen,
    sequence_batches,
)
from mp_lstm.data.order import epoch_order
from mp_lstm.data.source import Dropped
from mp_lstm.errors import InputError

EOS = 0
texts = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=14), min_size=1, max_size=25)
some_buckets = st.lists(st.integers(1, 16), min_size=1, max_size=4)


def text(sentences):
    """A split of sentences of word ids; each gets its `<eos>`."""
    tokens = [token for sentence in sentences for token in (*sentence, EOS)]
    return Split(np.array(tokens, np.int32), np.cumsum([0, *(len(sentence) + 1 for sentence in sentences)]))


def rows(source, epoch=0):
    """The real part of every row that is not empty, as (inputs, targets)."""
    found = []
    for index in range(source.num_batches(epoch)):
        batch = source.batch(epoch, index)
        for row, length in enumerate(batch.lengths.tolist()):
            if length:
                found.append((batch.inputs[:length, row].tolist(), batch.targets[:length, row].tolist()))
    return found


def whole(sentences):
    return sorted(([EOS, *sentence], [*sentence, EOS]) for sentence in sentences)


# Sentences


def test_stories_3_and_5_a_sentence_reads_eos_first_and_says_it_last():
    """In the example the last target was the first word, and `<eos>` was neither read nor predicted."""
    batch = SentenceBatches(text([[5, 6, 7]]), (4,), 1).batch(0, 0)
    assert batch.inputs.T.tolist() == [[EOS, 5, 6, 7]]
    assert batch.targets.T.tolist() == [[5, 6, 7, EOS]]
    assert batch.lengths.tolist() == [4]


def test_blank_lines_are_skipped_and_counted():
    source = SentenceBatches(text([[], [5, 6], [], [], [7]]), (1, 2, 4), 2)
    assert sorted(rows(source)) == whole([[5, 6], [7]])
    assert (source.dropped.blank, source.dropped.sentences, source.tokens, source.buckets) == (3, 0, 5, (2, 4))


def test_blank_lines_are_part_of_consecutive_text():
    source = ContiguousBatches(text([[], [5, 6], [], [7]]), 7, 1)
    assert source.tokens == 7
    assert rows(source) == [([0, 0, 5, 6, 0, 0, 7], [0, 5, 6, 0, 0, 7, 0])]


def test_story_4_padding_is_told_apart_by_lengths_alone():
    """The example trained on padding: it could not be told from a word."""
    batch = SentenceBatches(text([[5], [6, 7]]), (4,), 3, shuffle=False).batch(0, 0)
    assert batch.inputs.T.tolist() == [[EOS, 5, 0, 0], [EOS, 6, 7, 0], [0, 0, 0, 0]]
    assert batch.targets.T.tolist() == [[5, EOS, 0, 0], [6, 7, EOS, 0], [0, 0, 0, 0]]
    assert batch.lengths.tolist() == [2, 3, 0]
    assert (batch.weights, batch.resets) == (None, None)
    assert {batch.inputs.dtype, batch.targets.dtype, batch.lengths.dtype} == {np.dtype(np.int32)}


@given(texts, some_buckets, st.integers(1, 6), st.integers(0, 3), st.integers(0, 3))
def test_story_14_every_sentence_once_in_every_epoch(sentences, buckets, batch_size, seed, epoch):
    """The example dropped the tail of each bucket, and every sentence over the longest, without a word."""
    source = SentenceBatches(text(sentences), buckets, batch_size, seed)
    assert sorted(rows(source, epoch)) == whole(sentences)
    assert source.dropped == Dropped()
    assert source.tokens == sum(len(sentence) + 1 for sentence in sentences)
    for index in range(source.num_batches(epoch)):
        batch = source.batch(epoch, index)
        assert batch.inputs.shape[0] in source.buckets
        assert batch.inputs.shape[1] == batch_size


@given(texts, st.integers(2, 9), st.integers(1, 6))
def test_split_sentences_lose_no_token(sentences, longest, batch_size):
    source = SentenceBatches(text(sentences), (longest,), batch_size, policy="split", shuffle=False)
    pieces = rows(source)
    if source.buckets == (longest,):
        # In the order of the text, so the pieces joined are the text: targets go on across each cut.
        tokens = text(sentences).tokens.tolist()
        assert [token for _, targets in pieces for token in targets] == tokens
        assert [token for inputs, _ in pieces for token in inputs] == [EOS, *tokens[:-1]]
    assert sum(len(targets) for _, targets in pieces) == source.tokens
    assert max(len(targets) for _, targets in pieces) <= longest


@given(texts, st.integers(2, 15), st.integers(1, 6))
def test_pitfall_9_dropped_sentences_are_counted(sentences, longest, batch_size):
    """Others print "discarded N sentences" or nothing; here zero is the default, and "drop" counts."""
    kept = [sentence for sentence in sentences if len(sentence) + 1 <= longest]
    if not kept:
        with pytest.raises(InputError, match="are dropped"):
            SentenceBatches(text(sentences), (longest,), batch_size, policy="drop")
        return
    source = SentenceBatches(text(sentences), (longest,), batch_size, policy="drop")
    assert sorted(rows(source)) == whole(kept)
    lost = [len(sentence) + 1 for sentence in sentences if len(sentence) + 1 > longest]
    assert source.dropped == Dropped(len(lost), sum(lost))
    assert source.tokens == sum(len(targets) for _, targets in rows(source))


def test_pitfall_8_an_empty_bucket_is_no_bucket():
    source = SentenceBatches(text([[5], [6, 7, 8, 9, 9]]), (2, 3, 4, 6, 9), 2)
    assert source.buckets == (2, 6)
    assert source.num_batches() == 2


def test_story_13_each_epoch_is_shuffled_anew_and_repeatably():
    """The example shuffled once, without a seed."""
    sentences = [[1 + index % 9] * (1 + index % 11) for index in range(200)]
    source = SentenceBatches(text(sentences), (4, 8, 12), 4, seed=3)
    again = SentenceBatches(text(sentences), (4, 8, 12), 4, seed=3)
    other = SentenceBatches(text(sentences), (4, 8, 12), 4, seed=4)
    assert rows(source, 0) != rows(source, 1)
    assert rows(source, 0) != rows(other, 0)
    assert [rows(source, epoch) for epoch in (2, 0, 1)] == [rows(again, epoch) for epoch in (2, 0, 1)]


def test_batches_of_all_buckets_are_mixed():
    source = SentenceBatches(load_austen().valid, (8, 16, 32, 64), 20)
    times = [batch.inputs.shape[0] for _, batch in iterate(source, epochs=1)]
    assert sorted(times) != times
    assert set(times[: len(times) // 2]) >= {8, 16, 32, 64}


def test_story_18_the_callers_buckets_are_left_alone():
    buckets = [8, 4, 4]
    assert SentenceBatches(text([[1], [2] * 7]), buckets, 2).buckets == (4, 8)
    assert buckets == [8, 4, 4]


def test_story_19_an_empty_text_is_a_clear_error():
    """The example divided by zero."""
    empty = Split(np.zeros(0, np.int32), np.zeros(1, np.int64))
    with pytest.raises(InputError, match="there are no sentences to batch"):
        SentenceBatches(empty, (8,), 4)
    with pytest.raises(InputError, match="there is no text to batch"):
        ContiguousBatches(empty, 8, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, wanted an integer of at least 1"),
        ({"seed": -1}, "seed is -1, wanted an integer of at least 0"),
        ({"buckets": ()}, "buckets is empty"),
        ({"buckets": (4, 0)}, "a bucket is 0"),
    ],
)
def test_refuses_settings_out_of_range(settings, message):
    with pytest.raises(InputError, match=message):
        SentenceBatches(text([[1, 2]]), **{"buckets": (4,), "batch_size": 2} | settings)


def test_the_order_of_an_epoch_is_worked_out_once(monkeypatch):
    """It takes milliseconds, a batch hundredths of one. Around the end of an epoch two orders are in use."""
    calls = []
    monkeypatch.setattr(batches, "epoch_order", lambda *args: calls.append(args) or epoch_order(*args))
    source = SentenceBatches(load_austen().test, (8, 16, 24, 32, 64), 20)
    for index in range(10):
        source.batch(0, index)
        source.batch(1, index)
    assert len(calls) == 2


# Consecutive text


@given(texts, st.integers(1, 9), st.integers(1, 7))
def test_contiguous_rows_are_the_text(sentences, length, batch_size):
    split = text(sentences)
    source = ContiguousBatches(split, length, batch_size)
    epoch = [batch for _, batch in iterate(source, epochs=1)]
    inputs, targets = [], []
    for row in range(batch_size):
        for batch in epoch:
            inputs += batch.inputs[: batch.lengths[row], row].tolist()
            targets += batch.targets[: batch.lengths[row], row].tolist()
    assert targets == split.tokens.tolist()
    assert inputs == [EOS, *targets[:-1]]
    assert source.tokens == len(targets)


@given(texts, st.integers(1, 9), st.integers(1, 7))
def test_contiguous_rows_differ_by_one_step_at_most(sentences, length, batch_size):
    source = ContiguousBatches(text(sentences), length, batch_size)
    epoch = [source.batch(0, index) for index in range(source.num_batches())]
    steps = sum(batch.lengths for batch in epoch)
    assert steps.max() - steps.min() <= 1
    for index, batch in enumerate(epoch):
        assert batch.inputs.shape == batch.targets.shape == (length, batch_size)
        assert (batch.lengths == length).all() or index >= len(epoch) - 2
        assert batch.lengths.any()


def test_state_starts_at_zero_with_each_epoch_only():
    source = ContiguousBatches(text([[1, 2, 3]] * 5), 2, 3)
    resets = [batch.resets.tolist() for _, batch in iterate(source, epochs=2)]
    epoch = [[True] * 3] + [[False] * 3] * (source.num_batches() - 1)
    assert resets == epoch * 2


@pytest.mark.parametrize("name", ["length", "batch_size"])
def test_refuses_contiguous_settings_out_of_range(name):
    with pytest.raises(InputError, match=f"{name} is 0, wanted an integer of at least 1"):
        ContiguousBatches(text([[1]]), **{"length": 2, "batch_size": 2} | {name: 0})


# Any features


@given(st.lists(st.integers(2, 9), min_size=1, max_size=20), st.integers(1, 5), st.sampled_from(["extend", "split"]))
def test_dense_features_are_batched_like_tokens(lengths, batch_size, policy):
    """Of two steps or more: one step of text is a blank line."""
    ends = np.cumsum(lengths)
    ids = [np.arange(end - length, end, dtype=np.int32) for end, length in zip(ends, lengths, strict=True)]
    inputs = [{"frames": np.stack([steps, -steps], 1).astype(np.float32), "ids": steps} for steps in ids]
    dense = sequence_batches(inputs, ids, (3, 6), batch_size, seed=2, policy=policy)
    tokens = SentenceBatches(Split(np.concatenate(ids), np.cumsum([0, *lengths])), (3, 6), batch_size, 2, policy)
    assert dense.num_batches(1) == tokens.num_batches(1)
    for index in range(dense.num_batches(1)):
        batch, wanted = dense.batch(1, index), tokens.batch(1, index)
        np.testing.assert_array_equal(batch.lengths, wanted.lengths)
        np.testing.assert_array_equal(batch.targets, wanted.targets)
        np.testing.assert_array_equal(batch.inputs["ids"], wanted.targets)
        np.testing.assert_array_equal(batch.inputs["frames"], np.stack([wanted.targets, -wanted.targets], -1))


# The six lines of the README


def test_austen_comes_in_the_shapes_of_the_plan():
    plan = SimpleNamespace(batch_size=20, buckets={8: None, 16: None, 24: None, 32: None, 64: None})
    shapes = {batch.inputs.shape for batch in austen(plan, split="valid")}
    assert shapes == {(length, 20) for length in plan.buckets}
    tokens = [
        sum(int(batch.lengths.sum()) for batch in austen(plan, epochs=epochs, split="valid")) for epochs in (1, 2)
    ]
    assert tokens == [46_818, 2 * 46_818]


def test_austen_depends_on_the_seed():
    plan = SimpleNamespace(batch_size=20, buckets={32: None})
    one, two, other = (next(austen(plan, split="test", seed=seed)).inputs for seed in (1, 1, 2))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)


def test_austen_refuses_an_unknown_split_at_once():
    with pytest.raises(InputError, match="split is 'dev': pass one of train, valid, test"):
        austen(SimpleNamespace(batch_size=20, buckets={8: None}), split="dev")
