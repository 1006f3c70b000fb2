"""Text from a model: one word at a time, through the placed stages, any number of prompts at once.

    <eos>, prompt words --infer--> logits [1, B, V] --numpy--> next words --infer--> ...

Every prompt is a row, and every row reads a word of its own at each step: one of its prompt, then those drawn for it.
So prompts of different length need no padding, and a row's state is what it would be alone; a row whose text is
complete reads its last word again, which nobody looks at. One program a stage serves prompts of every length.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mp_lstm.data.reading import opened, pieces
from mp_lstm.data.vocabulary import EOS, Vocabulary
from mp_lstm.errors import InputError
from mp_lstm.runtime import Pipeline, State
from mp_lstm.training.sampling import Sampling, check_sampling, draw


def generate(
    pipe: Pipeline,
    state: State,
    vocabulary: Vocabulary,
    prompts: str | Sequence[str],
    *,
    tokens: int = 50,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_at_eos: bool = False,
    carry: bool = True,
) -> list[str]:
    """Continues prompts, each as if it were alone.

    The model first reads `<eos>`, as at the beginning of a text. Words of a prompt that it does not know are read as
    `<unk>`, which is said on stderr.

    Args:
      pipe: of a language model.
      state: left as it is.
      vocabulary: of the model.
      prompts: one, or several. Each is words between white space, a sentence a line; it may be empty.
      tokens: how many are generated for each, ends of sentences included.
      temperature: what the logits are divided by; 0: always the likeliest word.
      top_k: draw from so many words, the likeliest; None: from all.
      top_p: of these, draw from the likeliest whose probabilities add up to this share; None: from all.
      seed: of the draws, the same for every prompt, so that a text does not depend on the prompts beside it.
      stop_at_eos: a text ends with the first end of a sentence that is generated, or after `tokens`.
      carry: whether the state goes on from a sentence to the next, as in training on contiguous text; where training
        took each sentence for itself, it should not.

    Returns:
      The prompts with their continuations, a sentence a line.

    Raises:
      InputError: a number is out of range; there is no prompt; a word is unknown and the vocabulary has no `<unk>`.

    Example:
      >>> import jax, mp_lstm, optax
      >>> vocabulary = mp_lstm.data.Vocabulary(("<eos>", "<unk>", "the", "ball"))
      >>> model = mp_lstm.language_model(vocab=4, embed=4, hidden=8, layers=2)
      >>> plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=jax.devices()[:1])
      >>> pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
      >>> state = pipe.init(jax.random.key(0))
      >>> texts = mp_lstm.generate(pipe, state, vocabulary, ["the ball", "the"], tokens=5)
      >>> [text.startswith("the") for text in texts], texts[:1] == mp_lstm.generate(
      ...     pipe, state, vocabulary, "the ball", tokens=5)
      ([True, True], True)
    """
    sampling = Sampling(temperature, top_k, top_p)
    check_sampling(sampling)
    if tokens < 0:
        raise InputError(f"tokens is {tokens}, at least 0 is wanted")
    if seed < 0:
        raise InputError(f"seed is {seed}, a whole number of at least 0 is wanted: pass e.g. {-seed}")
    rows = _rows(vocabulary, [prompts] if isinstance(prompts, str) else prompts, tokens, seed)
    step, held = 0, None
    while any(row.left for row in rows):
        words = np.array([[row.ids[min(step, len(row.ids) - 1)] for row in rows]], np.int32)
        resets = None if carry else words[0] == vocabulary.eos
        logits, held = pipe.infer(state, words, held, resets=resets)
        for row, scores in _drawing(rows, step, logits):
            word = draw(scores, sampling, row.generator)
            row.ids.append(word)
            row.words.append(vocabulary.words[word])
            row.left = 0 if stop_at_eos and word == vocabulary.eos else row.left - 1
        step += 1
    return [_text(row.words) for row in rows]


@dataclass
class _Row:
    """A text that grows: its ids from the first `<eos>` on, its words, and how many more are to be drawn."""

    ids: list[int]
    words: list[str]
    left: int
    generator: np.random.Generator


def _rows(vocabulary: Vocabulary, prompts: Sequence[str], tokens: int, seed: int) -> list[_Row]:
    """A row for each prompt; says which words are unknown."""
    if not prompts:
        raise InputError("there is no prompt, at least one is wanted: an empty one does")
    texts = [read_prompt(prompt) for prompt in prompts]
    unknown = unknown_words(vocabulary, [word for words in texts for word in words])
    if unknown and vocabulary.unk is not None:
        print(f"the model does not know {', '.join(map(repr, unknown))}: read as <unk>", file=sys.stderr)
    return [
        _Row([vocabulary.eos, *vocabulary.encode(words).tolist()], words, tokens, np.random.default_rng(seed))
        for words in texts
    ]


def _drawing(rows: Sequence[_Row], step: int, logits: object) -> list[tuple[_Row, np.ndarray]]:
    """The rows that have read all of their text and want more, with their logits; others wait for no device."""
    ready = [index for index, row in enumerate(rows) if row.left and len(row.ids) == step + 1]
    host = np.asarray(logits)[0] if ready else np.empty(0)
    return [(rows[index], host[index]) for index in ready]


def _text(words: Sequence[str]) -> str:
    return "\n".join(line.strip() for line in " ".join(words).split(EOS)).strip("\n")


def read_prompt(prompt: str) -> list[str]:
    r"""The words of a prompt; lines are sentences, so `<eos>` stands between them.

    Example:
      >>> read_prompt("it was so .\nthe end")
      ['it', 'was', 'so', '.', '<eos>', 'the', 'end']
    """
    return f" {EOS} ".join(line for line in prompt.splitlines() if line.strip()).split()


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    r"""Reads a file of prompts, one a line; lines without words are none.

    Raises:
      InputError: the file cannot be read, is not UTF-8, or has no words.

    Example:
      >>> import pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "prompts.txt")
      ...     _ = path.write_text("it was\n\nthe end\n")
      ...     read_prompts(path)
      ['it was', 'the end']
    """
    prompts: list[list[str]] = [[]]
    with opened(path) as stream:
        for piece in pieces(stream, os.fspath(path)):
            prompts[-1] += piece.words
            if piece.ends:
                prompts.append([])
    if not any(prompts):
        raise InputError(f"{os.fspath(path)} has no words: write one prompt a line")
    return [" ".join(words) for words in prompts if words]


def unknown_words(vocabulary: Vocabulary, words: Sequence[str]) -> list[str]:
    """The words that a vocabulary lacks, each once.

    Example:
      >>> unknown_words(Vocabulary(("<eos>", "<unk>", "ball")), ["the", "ball", "the"])
      ['the']
    """
    return list(dict.fromkeys(word for word in words if word not in vocabulary))
