"""Generation: whatever the plan, the text is what the model says when it is stepped by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
from mp_lstm.data import Vocabulary
from mp_lstm.errors import InputError
from mp_lstm.training.generate import draw, generate, read_prompt
from mp_lstm.training.metrics import counted_compilations

WORDS = Vocabulary(("<eos>", "<unk>", "the", "ball", "was", "over", ".", "and"))


@pytest.fixture(scope="module")
def model() -> mp_lstm.Model:
    return mp_lstm.language_model(vocab=len(WORDS), embed=5, hidden=6, layers=2, dropout=0.5, init_scale=2.0)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(3))


@pytest.fixture(scope="module")
def placed(model, params, devices):
    """A pipeline of two stages, and its state."""
    return _placed(model, params, devices[:2], (2, 2))


def _placed(model, params, devices, partition):
    plan = mp_lstm.make_plan(model, batch_size=2, lengths=(4,), devices=devices, partition=partition)
    pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
    return pipe, pipe.load(params)


def _by_hand(model, params, words: list[int], count: int) -> list[int]:
    """The likeliest continuation, the whole text read anew for each word: no carried state, no pipeline."""

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def loss(word, inputs, weights):
        """Of one candidate as the word that follows where the weight is: the likeliest has the least."""
        return model.loss(params, mp_lstm.Batch(inputs, jnp.full_like(inputs, word), weights))[0]

    words = list(words)
    for _ in range(count):
        inputs, weights = np.zeros((8, 1), np.int32), np.zeros((8, 1), np.float32)
        inputs[: len(words), 0] = words
        weights[len(words) - 1] = 1
        words.append(int(np.argmin(loss(np.arange(len(WORDS)), inputs, weights))))
    return words[-count:]


def test_temperature_0_gives_the_likeliest_words(model, params, placed) -> None:
    text = generate(*placed, WORDS, "the ball", tokens=4, temperature=0)
    words = _by_hand(model, params, [0, *WORDS.encode("the ball").tolist()], 4)
    assert text.replace("\n", " <eos> ").split() == ["the", "ball", *(WORDS.words[word] for word in words)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_text_for_any_plan(model, params, placed, devices, temperature: float) -> None:
    other = _placed(model, params, [devices[3], devices[0], devices[3]], (1, 2, 1))
    texts = [generate(*both, WORDS, "and", tokens=12, temperature=temperature, seed=5) for both in (placed, other)]
    assert texts[0] == texts[1]


def test_a_tiny_temperature_gives_the_likeliest_word_without_a_warning() -> None:
    assert draw(np.array([1.0, 3.0, 2.0]), 1e-320, np.random.default_rng(0)) == 1


def test_a_negative_seed(placed) -> None:
    with pytest.raises(InputError, match=r"seed is -1, a whole number of at least 0 is wanted: pass e\.g\. 1"):
        generate(*placed, WORDS, "the", seed=-1)


def test_the_same_seed_gives_the_same_text_and_another_one_another(placed) -> None:
    texts = [generate(*placed, WORDS, "the", tokens=20, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_state_is_left_as_it_is(placed) -> None:
    pipe, state = placed
    before = pipe.params(state)
    generate(pipe, state, WORDS, "the", tokens=3)
    jax.tree.map(np.testing.assert_array_equal, before, pipe.params(state))


def test_one_program_a_stage_serves_prompts_of_every_length(placed) -> None:
    generate(*placed, WORDS, "the", tokens=2)
    with counted_compilations() as count:
        generate(*placed, WORDS, "the ball was over and over .", tokens=2)
        generate(*placed, WORDS, "", tokens=2)
    assert count() == 0


def test_exactly_so_many_tokens_are_generated_ends_of_sentences_included(placed) -> None:
    text = generate(*placed, WORDS, "the ball", tokens=30, temperature=2.0)
    assert "\n" in text, "no sentence ended: this test needs another seed"
    # What is stripped at the end of the text would be missing here; this seed's text ends with a word.
    assert len(text.replace("\n", " <eos> ").split()) == 2 + 30
    assert generate(*placed, WORDS, "the ball", tokens=0) == "the ball"


def test_a_new_sentence_begins_from_nothing_unless_the_state_is_carried(placed, monkeypatch) -> None:
    def logits(prompt: str, *, carry: bool) -> np.ndarray:
        """What the next word is drawn from."""
        drawn = []
        monkeypatch.setattr("mp_lstm.training.generate.draw", lambda logits, *_: drawn.append(logits) or 2)
        generate(*placed, WORDS, prompt, tokens=1, carry=carry)
        return drawn[0]

    np.testing.assert_array_equal(logits("over\nthe", carry=False), logits("the", carry=False))
    assert np.abs(logits("over\nthe", carry=True) - logits("the", carry=True)).max() > 1e-3


def test_unknown_words_are_read_as_unk_and_said_on_stderr(placed, capsys) -> None:
    text = generate(*placed, WORDS, "the bat was the bat", tokens=3)
    known = generate(*placed, WORDS, "the <unk> was the <unk>", tokens=3)
    assert text.replace("bat", "<unk>") == known
    captured = capsys.readouterr()
    assert captured.err == "the model does not know 'bat': read as <unk>\n"
    assert captured.out == ""


def test_an_unknown_word_without_unk_is_refused(placed) -> None:
    closed = Vocabulary(("<eos>", "a", "the", "ball", "was", "over", ".", "and"))
    with pytest.raises(InputError, match="'bat' is not among the 8 words"):
        generate(*placed, closed, "the bat")


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"temperature": -0.5}, {"temperature": float("nan")}])
def test_numbers_out_of_range(placed, wrong: dict) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(InputError, match=f"^{name} is {value}, "):
        generate(*placed, WORDS, "the", **wrong)


def test_words_are_drawn_with_the_softmax_of_the_logits_over_the_temperature() -> None:
    logits, generator = np.array([0.0, 1.0, 2.0, -np.inf], np.float32), np.random.default_rng(0)
    for temperature in (0.5, 1.0, 3.0):
        counts = np.bincount([draw(logits, temperature, generator) for _ in range(20_000)], minlength=4)
        wanted = np.asarray(jax.nn.softmax(jnp.array(logits) / temperature))
        np.testing.assert_allclose(counts / counts.sum(), wanted, atol=0.012)  # three standard deviations


def test_extreme_logits_and_temperatures_neither_overflow_nor_leave_the_vocabulary() -> None:
    generator = np.random.default_rng(0)
    assert draw(np.array([-3e38, 3e38, 0.0], np.float32), 1e-30, generator) == 1
    assert {draw(np.zeros(3, np.float32), 1e30, generator) for _ in range(100)} == {0, 1, 2}

    class Most:
        def random(self) -> float:
            return np.nextafter(1.0, 0.0)

    assert draw(np.full(1000, 0.1, np.float32), 1.0, Most()) == 999  # type: ignore[arg-type]


def test_lines_of_a_prompt_are_sentences() -> None:
    assert read_prompt("\n the  ball\n\nwas over\n") == ["the", "ball", "<eos>", "was", "over"]
    assert read_prompt(" ") == []
