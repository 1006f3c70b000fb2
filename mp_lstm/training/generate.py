"""Text from a model: one word at a time, through the placed stages.

    <eos>, prompt words --infer--> logits [1, 1, V] --numpy--> next word --infer--> ...

The prompt is read a word at a time too, so that one program serves prompts of every length. Words are drawn on the
host, in float64, so the same seed gives the same text wherever the stages are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from mp_lstm.data.vocabulary import EOS, Vocabulary
from mp_lstm.errors import InputError
from mp_lstm.runtime import Pipeline, State


def generate(
    pipe: Pipeline,
    state: State,
    vocabulary: Vocabulary,
    prompt: str,
    *,
    tokens: int = 50,
    temperature: float = 1.0,
    seed: int = 0,
    carry: bool = True,
) -> str:
    """Continues a prompt.

    The model first reads `<eos>`, as at the beginning of a text. Words of the prompt that it does not know are read as
    `<unk>`, which is said on stderr.

    Args:
      pipe: of a language model.
      state: left as it is.
      vocabulary: of the model.
      prompt: words between white space, a sentence a line; may be empty.
      tokens: how many are generated, ends of sentences included.
      temperature: what the logits are divided by; 0: always the likeliest word.
      seed: of the draws.
      carry: whether the state goes on from a sentence to the next, as in training on contiguous text; where training
        took each sentence for itself, it should not.

    Returns:
      The prompt and its continuation, a sentence a line.

    Raises:
      InputError: a number is out of range; a word is unknown and the vocabulary has no `<unk>`.

    Example:
      >>> import jax, mp_lstm, optax
      >>> vocabulary = Vocabulary(("<eos>", "<unk>", "the", "ball"))
      >>> model = mp_lstm.language_model(vocab=4, embed=4, hidden=8, layers=2)
      >>> plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=jax.devices()[:1])
      >>> pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
      >>> state = pipe.init(jax.random.key(0))
      >>> text = generate(pipe, state, vocabulary, "the ball", tokens=5)
      >>> text.startswith("the ball"), text == generate(pipe, state, vocabulary, "the ball", tokens=5)
      (True, True)
    """
    if tokens < 0:
        raise InputError(f"tokens is {tokens}, at least 0 is wanted")
    if not 0 <= temperature < np.inf:
        raise InputError(f"temperature is {temperature}, a number of at least 0 is wanted (0: the likeliest word)")
    if seed < 0:
        raise InputError(f"seed is {seed}, a whole number of at least 0 is wanted: pass e.g. {-seed}")
    words = read_prompt(prompt)
    if (unknown := unknown_words(vocabulary, words)) and vocabulary.unk is not None:
        print(f"the model does not know {', '.join(map(repr, unknown))}: read as <unk>", file=sys.stderr)
    generator = np.random.default_rng(seed)
    unread = [vocabulary.eos, *vocabulary.encode(words).tolist()]
    logits = held = None
    for _ in range(tokens):
        for word in unread:
            if word == vocabulary.eos and not carry:
                held = None
            logits, held = pipe.infer(state, np.full((1, 1), word, np.int32), held)
        word = draw(np.asarray(logits)[0, 0], temperature, generator)
        words.append(vocabulary.words[word])
        unread = [word]
    return "\n".join(line.strip() for line in " ".join(words).split(EOS)).strip("\n")


def read_prompt(prompt: str) -> list[str]:
    r"""The words of a prompt; lines are sentences, so `<eos>` stands between them.

    Example:
      >>> read_prompt("it was so .\nthe end")
      ['it', 'was', 'so', '.', '<eos>', 'the', 'end']
    """
    return f" {EOS} ".join(line for line in prompt.splitlines() if line.strip()).split()


def unknown_words(vocabulary: Vocabulary, words: Sequence[str]) -> list[str]:
    """The words that a vocabulary lacks, each once.

    Example:
      >>> unknown_words(Vocabulary(("<eos>", "<unk>", "ball")), ["the", "ball", "the"])
      ['the']
    """
    return list(dict.fromkeys(word for word in words if word not in vocabulary))


def draw(logits: Float[np.ndarray, " V"], temperature: float, generator: np.random.Generator) -> int:
    """Draws an index with probability softmax(logits / temperature), at temperature 0 the likeliest.

    Example:
      >>> draw(np.array([1.0, 3.0, 2.0]), 0.0, np.random.default_rng(0))
      1
    """
    if temperature == 0:
        return int(np.argmax(logits))
    shifted = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # at a tiny temperature all but the likeliest are infinitely unlikely
        shifted = (shifted - shifted.max()) / temperature
    cumulative = np.cumsum(np.exp(shifted))
    index = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return min(int(index), len(logits) - 1)  # the product may round up to the whole sum
