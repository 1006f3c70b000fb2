"""Scores: every token, in the order of the text, with the likelihood that the textbook's model gives it."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import examples
import mp_lstm
import reference
from mp_lstm.data import ContiguousBatches, SentenceBatches, Split, Vocabulary
from mp_lstm.training import score as module
from mp_lstm.training.config import Config
from mp_lstm.training.score import score, score_lines, text_source

LENGTHS = (7, 2, 5, 3, 11, 2, 4)  # <eos> included


@pytest.fixture(scope="module")
def text() -> Split:
    """Sentences whose buckets are in another order than they are."""
    rng = np.random.default_rng(0)
    lines = [[*rng.integers(1, examples.VOCAB, length - 1), 0] for length in LENGTHS]
    return Split(np.concatenate(lines).astype(np.int32), np.cumsum([0, *LENGTHS]))


@pytest.fixture(scope="module")
def placed():
    """A pipeline of two stages, and its state."""
    model = mp_lstm.language_model(**examples.SIZES, dropout=0.5)
    pipe = examples.pipeline(model, batch_size=3, lengths=(4,))
    return pipe, pipe.load(examples.random_params(model))


def by_hand(placed, text: Split, ends: list[int]) -> np.ndarray:
    """Losses of rows of text that end at these places, each read from a zero state: all at once, padded at the end."""
    rows = np.split(text.inputs, ends)
    inputs = np.zeros((max(map(len, rows)), len(rows)), np.int32)
    for index, row in enumerate(rows):
        inputs[: len(row), index] = row
    logits = reference.logits(reference.Spec(layers=2), placed[0].params(placed[1]), inputs)
    of_rows = [logits[: len(row), index] for index, row in enumerate(rows)]
    probabilities = jax.nn.log_softmax(np.concatenate(of_rows))
    return -np.asarray(probabilities)[np.arange(len(text.tokens)), text.tokens]


@pytest.mark.parametrize(("policy", "piece"), [("extend", 3), ("drop", 32)])
def test_sentences_in_the_order_of_the_text(placed, text: Split, policy: str, piece: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    scores = score(*placed, SentenceBatches(text, (4, 8), 3, policy=policy, shuffle=False))
    wanted = by_hand(placed, text, text.offsets[1:-1].tolist())
    longest = slice(*text.offsets[4:6])
    left_out = np.zeros(len(wanted), bool)
    left_out[longest] = policy == "drop"
    np.testing.assert_array_equal(np.isnan(scores.losses), left_out)
    np.testing.assert_allclose(scores.losses[~left_out], wanted[~left_out], rtol=1e-5)
    assert scores.result.tokens == sum(LENGTHS) - left_out.sum()
    assert scores.result.loss == pytest.approx(wanted[~left_out].mean(), rel=1e-5)
    assert scores.result.perplexity == pytest.approx(np.exp(scores.result.loss))


def test_rows_of_text_carry_their_state(placed, text: Split, monkeypatch) -> None:
    """34 tokens in 3 rows: 12, 11, 11 of them; a batch is 5 steps and read in pieces of 3 and 2."""
    monkeypatch.setattr(module, "PIECE", 3)
    wanted = by_hand(placed, text, [12, 23])
    np.testing.assert_allclose(score(*placed, ContiguousBatches(text, 5, 3)).losses, wanted, rtol=1e-5)


def test_lines_leave_out_what_was_not_scored() -> None:
    scores = module.Scores(np.array([1, 0, 1, 0], np.int32), np.array([np.nan, np.nan, 2.0, 0.5]))
    assert list(score_lines(scores, Vocabulary(("<eos>", "so")))) == ["so\t2.000000\n", "<eos>\t0.500000\n"]


@pytest.mark.parametrize(("length", "rows"), [(100, 1), (10, 3), (2, 8)])
def test_a_short_text_is_not_torn_into_rows(text: Split, length: int, rows: int) -> None:
    config = Config()
    data = replace(config.data, mode="contiguous", length=length, batch_size=8)
    assert text_source(replace(config, data=data), text).batch_size == rows


def test_a_text_is_cut_as_the_run_cuts_its_own(text: Split) -> None:
    config = Config()
    data = replace(config.data, buckets=(4, 8), batch_size=20, long_sentences="drop")
    source = text_source(replace(config, data=data), text)
    assert (source.buckets, source.batch_size, source.dropped.sentences) == ((4, 8), 7, 1)
