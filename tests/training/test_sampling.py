"""Drawing: frequencies are those of the definition, and extremes neither overflow nor leave what is kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mp_lstm.training.sampling import Sampling, draw, kept

LOGITS = np.array([0.0, 1.0, 2.0, -np.inf], np.float32)


def frequencies(sampling: Sampling, count: int = 5_000) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.bincount([draw(LOGITS, sampling, generator) for _ in range(count)], minlength=4) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_words_are_drawn_with_the_softmax_of_the_logits_over_the_temperature(temperature: float) -> None:
    wanted = np.asarray(jax.nn.softmax(jnp.array(LOGITS) / temperature))
    np.testing.assert_allclose(frequencies(Sampling(temperature)), wanted, atol=0.022)  # three standard deviations


def test_of_the_kept_words_each_is_drawn_with_its_share() -> None:
    """0.665, 0.245 and 0.090 are the probabilities: 0.9 takes two words, as two are 0.91 together."""
    wanted = np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.9), Sampling(top_k=3, top_p=0.9)):
        np.testing.assert_allclose(frequencies(sampling), [0, *wanted, 0], atol=0.022)


def test_the_nucleus_is_the_least_set_that_reaches_the_share() -> None:
    half, quarter, eighth = 0.5, 0.25, 0.125
    probabilities = np.array([eighth, half, quarter, eighth])
    for share, words in ((1e-9, 1), (half, 1), (half + 1e-9, 2), (half + quarter, 2), (0.8, 3), (1.0, 4)):
        assert np.count_nonzero(kept(probabilities, None, share)) == words


def test_the_share_is_that_of_the_k_likeliest() -> None:
    """Half of 0.75 is reached by the likeliest alone, 0.7 of it is not."""
    probabilities = np.array([0.125, 0.5, 0.25, 0.125])
    assert kept(probabilities, 2, 0.66).tolist() == [0, 0.5, 0, 0]
    assert kept(probabilities, 2, 0.67).tolist() == [0, 0.5, 0.25, 0]


def test_of_equally_likely_words_the_first_are_kept() -> None:
    assert kept(np.full(4, 0.25), 3, None).tolist() == [0.25, 0.25, 0.25, 0]
    assert kept(np.full(4, 0.25), 9, None).tolist() == [0.25] * 4


def test_a_tiny_temperature_gives_the_likeliest_word_without_a_warning() -> None:
    assert draw(np.array([1.0, 3.0, 2.0]), Sampling(1e-320), np.random.default_rng(0)) == 1


def test_extreme_logits_and_temperatures_neither_overflow_nor_leave_the_vocabulary() -> None:
    generator = np.random.default_rng(0)
    assert draw(np.array([-3e38, 3e38, 0.0], np.float32), Sampling(1e-30), generator) == 1
    assert {draw(np.zeros(3, np.float32), Sampling(1e30), generator) for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("words", [1, 2, 3, 7, 1000, 1023])
def test_the_largest_number_draws_the_last_word_that_is_kept(words: int) -> None:
    class Most(np.random.Generator):
        def random(self, *_, **__) -> float:
            return float(np.nextafter(1.0, 0.0))

    most, logits = Most(np.random.PCG64(0)), np.full(1024, 0.1, np.float32)
    assert draw(logits[:words], Sampling(), most) == words - 1
    assert draw(logits, Sampling(top_k=words), most) == words - 1
