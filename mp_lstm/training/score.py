"""The likelihood of each token of a text, through the placed stages.

    batches of (inputs, positions in the text) --infer, PIECE steps at a time--> logits --log-softmax--> [N] by position

Batches are those that an evaluation would take: same rows, same buckets, same carried state. Each goes through the
stages a few steps at a time, so that logits [PIECE, B, V] are all that is ever held of them; the stages work on
different pieces at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int32, Integer

from mp_lstm.data import ContiguousBatches, SentenceBatches, Sequences, Split, Vocabulary, iterate
from mp_lstm.layers.batch import Batch
from mp_lstm.runtime import Pipeline, State
from mp_lstm.runtime.placement import put
from mp_lstm.training.config import Config
from mp_lstm.training.evaluate import SplitResult
from mp_lstm.training.metrics import perplexity

PIECE = 32  # time steps


class Scores(NamedTuple):
    """A text's tokens, each with its negative log-likelihood, in the order of the text.

    Args:
      tokens: ids.
      losses: not a number where the setting leaves a sentence out.
    """

    tokens: Int32[np.ndarray, " N"]
    losses: Float64[np.ndarray, " N"]

    @property
    def result(self) -> SplitResult:
        """Loss and perplexity per token that was read."""
        mean, count = float(np.nanmean(self.losses)), int(np.isfinite(self.losses).sum())
        return SplitResult(mean, perplexity(mean), count)


def score(pipe: Pipeline, state: State, source: SentenceBatches | ContiguousBatches) -> Scores:
    """Scores every token of a source's text.

    Args:
      pipe: of a language model.
      state: left as it is.
      source: of a `Split`.

    Returns:
      The scores; their mean is what an evaluation of the same batches finds.

    Example:
      >>> import mp_lstm, optax
      >>> model = mp_lstm.language_model(vocab=4, embed=4, hidden=8, layers=2)
      >>> plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=jax.devices()[:1])
      >>> pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
      >>> text = Split(np.array([2, 3, 0, 3, 0], np.int32), np.array([0, 3, 5]))
      >>> scores = score(pipe, pipe.init(jax.random.key(0)), SentenceBatches(text, (8,), 4))
      >>> scores.tokens.tolist(), scores.losses.shape
      ([2, 3, 0, 3, 0], (5,))
    """
    split = source.split
    targets = split.targets
    positions = replace(source, split=Sequences(split.inputs, np.arange(len(targets)), split.offsets))
    losses = np.full(len(targets), np.nan)
    carry = None
    for _, batch in iterate(positions, epochs=1):
        found, carry = _of_batch(pipe, state, batch, targets[batch.targets], carry)
        assert batch.lengths is not None, "a source's batches have lengths"
        real = np.arange(len(found))[:, None] < batch.lengths
        losses[batch.targets[real]] = found[real]
    return Scores(targets, losses)


def score_lines(scores: Scores, vocabulary: Vocabulary) -> Iterator[str]:
    r"""Lines of a file of scores: a token, a tab, its negative log-likelihood.

    Example:
      >>> scores = Scores(np.array([1, 0], np.int32), np.array([2.5, 0.25]))
      >>> list(score_lines(scores, Vocabulary(("<eos>", "so"))))
      ['so\t2.500000\n', '<eos>\t0.250000\n']
    """
    for token, loss in zip(scores.tokens, scores.losses, strict=True):
        if not np.isnan(loss):
            yield f"{vocabulary.words[token]}\t{loss:.6f}\n"


def text_source(config: Config, text: Split) -> SentenceBatches | ContiguousBatches:
    """Makes batches of a text that is no split, as the run that is configured makes those of its splits.

    A text too short to fill the rows of a batch has fewer rows: each would begin without knowing what came before.

    Args:
      config: of the run.
      text: in the run's words.

    Returns:
      The source.

    Example:
      >>> from mp_lstm.training.config import load
      >>> config = load(overrides=["--data.mode", "contiguous", "--data.length", "2"])
      >>> text_source(config, Split(np.array([2, 3, 0, 3, 0], np.int32), np.array([0, 3, 5]))).batch_size
      2
    """
    data = config.data
    if data.mode == "contiguous":
        rows = min(data.batch_size, max(1, len(text.tokens) // data.length))
        return ContiguousBatches(text, data.length, rows)
    buckets = (PIECE,) if data.buckets == "auto" else data.buckets
    rows = min(data.batch_size, len(text.lengths))
    return SentenceBatches(text, buckets, rows, policy=data.long_sentences, shuffle=False)


def _of_batch(
    pipe: Pipeline, state: State, batch: Batch, targets: np.ndarray, carry: Any
) -> tuple[Float[np.ndarray, "T B"], Any]:
    """Losses of a batch's steps, anything on padding, and the carry where there is one."""
    last, pieces = pipe.stages[-1].sharding, []
    held, resets = (carry, batch.resets) if batch.resets is not None else (None, None)
    for start in range(0, len(targets), PIECE):
        steps = slice(start, start + PIECE)
        logits, held = pipe.infer(state, batch.inputs[steps], held, resets=resets)
        resets = None
        pieces.append(_losses(logits, put(np.array(targets[steps]), last)))
    return np.concatenate([np.asarray(piece) for piece in pieces]), held


@jax.jit
def _losses(logits: Float[Array, "T B V"], targets: Integer[Array, "T B"]) -> Float[Array, "T B"]:
    picked = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked
