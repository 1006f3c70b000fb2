"""Generation: whatever the plan, the text is what the model says when it is stepped by hand."""

from __future__ import annotations

import functools
import gzip

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
from mp_lstm.data import Vocabulary
from mp_lstm.errors import InputError
from mp_lstm.training.generate import generate, read_prompt, read_prompts
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
    (text,) = generate(*placed, WORDS, "the ball", tokens=4, temperature=0)
    words = _by_hand(model, params, [0, *WORDS.encode("the ball").tolist()], 4)
    assert text.replace("\n", " <eos> ").split() == ["the", "ball", *(WORDS.words[word] for word in words)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_text_for_any_plan(model, params, placed, devices, temperature: float) -> None:
    other = _placed(model, params, [devices[3], devices[0], devices[3]], (1, 2, 1))
    options = {"tokens": 12, "temperature": temperature, "seed": 5}
    texts = [generate(*both, WORDS, ["and", "the ball was"], **options) for both in (placed, other)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_text_does_not_depend_on_the_prompts_beside_it(placed, temperature: float, carry: bool) -> None:
    """Prompts of other lengths, with sentences that end at other steps, in the prompt and drawn."""
    prompts = ["the ball was over .", "", "over\nthe", "and", "the ball\nwas over and over\nand"]
    options = {"tokens": 9, "temperature": temperature, "seed": 3, "carry": carry}
    alone = [generate(*placed, WORDS, prompt, **options)[0] for prompt in prompts]
    assert generate(*placed, WORDS, prompts, **options) == alone
    assert temperature == 0 or "\n" in alone[3], "no sentence ended: this test needs another seed"


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}])
def test_of_the_likeliest_word_alone_nothing_is_left_to_chance(placed, options: dict) -> None:
    likeliest = generate(*placed, WORDS, "the", tokens=8, temperature=0)
    assert generate(*placed, WORDS, "the", tokens=8, temperature=3.0, **options) == likeliest


def test_a_text_may_end_with_its_first_sentence(placed) -> None:
    """Others in the batch go on; the prompt's own sentences do not count."""
    options = {"tokens": 30, "temperature": 2.0, "stop_at_eos": True}
    whole = generate(*placed, WORDS, ["the ball\nwas", "and", "over"], **options | {"stop_at_eos": False})
    ended = generate(*placed, WORDS, ["the ball\nwas", "and", "over"], **options)
    assert [text.count("\n") for text in ended] == [1, 0, 0]
    assert all(one != all_of and all_of.startswith(f"{one}\n") for one, all_of in zip(ended, whole, strict=True))
    (short,) = generate(*placed, WORDS, "and", **options | {"tokens": 1})
    assert len(short.split()) == 2


def test_no_prompt_at_all(placed) -> None:
    with pytest.raises(InputError, match="there is no prompt, at least one is wanted: an empty one does"):
        generate(*placed, WORDS, [])


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
    (text,) = generate(*placed, WORDS, "the ball", tokens=30, temperature=2.0)
    assert "\n" in text, "no sentence ended: this test needs another seed"
    # What is stripped at the end of the text would be missing here; this seed's text ends with a word.
    assert len(text.replace("\n", " <eos> ").split()) == 2 + 30
    assert generate(*placed, WORDS, ["the ball", ""], tokens=0) == ["the ball", ""]


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
    text, _ = generate(*placed, WORDS, ["the bat was the bat", "bat"], tokens=3)
    known, _ = generate(*placed, WORDS, ["the <unk> was the <unk>", "<unk>"], tokens=3)
    assert text.replace("bat", "<unk>") == known
    captured = capsys.readouterr()
    assert captured.err == "the model does not know 'bat': read as <unk>\n"
    assert captured.out == ""


def test_an_unknown_word_without_unk_is_refused(placed) -> None:
    closed = Vocabulary(("<eos>", "a", "the", "ball", "was", "over", ".", "and"))
    with pytest.raises(InputError, match="'bat' is not among the 8 words"):
        generate(*placed, closed, "the bat")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": -1},
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
    ],
)
def test_numbers_out_of_range(placed, wrong: dict) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(InputError, match=f"^{name} is {value}, "):
        generate(*placed, WORDS, "the", **wrong)


def test_lines_of_a_prompt_are_sentences() -> None:
    assert read_prompt("\n the  ball\n\nwas over\n") == ["the", "ball", "<eos>", "was", "over"]
    assert read_prompt(" ") == []


def test_a_file_of_prompts_may_be_packed_and_come_from_elsewhere(tmp_path) -> None:
    with gzip.open(tmp_path / "prompts.txt.gz", "wb") as file:
        file.write("\ufeffthe ball\r\n\r\n  caf\u00e9 \r\nand".encode())
    assert read_prompts(tmp_path / "prompts.txt.gz") == ["the ball", "caf\u00e9", "and"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read \(No such file or directory\): pass a text file"),
        (b" \n\n", r"prompts\.txt has no words: write one prompt a line"),
        (b"so\ncaf\xe9\n", r"prompts\.txt, line 2: the byte 0xe9 is not UTF-8"),
    ],
)
def test_a_bad_file_of_prompts(tmp_path, content: bytes | None, message: str) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_prompts(path)
