"""Loss and perplexity of a state on a whole split: a token counts the same wherever it stands."""

from __future__ import annotations

from typing import NamedTuple

from mp_lstm.data import iterate
from mp_lstm.errors import InputError
from mp_lstm.runtime import Metrics, State
from mp_lstm.training.metrics import Sums, perplexity
from mp_lstm.training.setup import Setup


class SplitResult(NamedTuple):
    """What an evaluation of a split found: loss and perplexity are per token."""

    loss: float
    perplexity: float
    tokens: int


def evaluate(setup: Setup, state: State, split: str) -> SplitResult:
    """Evaluates a state on all of a split; every token counts the same.

    Args:
      setup: of the run.
      state: left as it is.
      split: "train", "valid" or "test".

    Returns:
      The result, that of the averaged parameters where the optimizer keeps an average and it has begun. Where rows of
      text go on from batch to batch, so does the recurrent state.

    Raises:
      InputError: there is no such split.
    """
    if split not in setup.sources._fields:
        raise InputError(f"split is {split!r}, one of {', '.join(setup.sources._fields)} is wanted")
    if setup.pipe.keeps_average:
        state = setup.pipe.averaged(state)
    sums, carry, unread = Sums(), None, None
    for _, batch in iterate(getattr(setup.sources, split), epochs=1):
        metrics = setup.pipe.evaluate(state, batch, carry=carry)
        carry = metrics.carry
        sums, unread = _added(sums, unread), metrics
    sums = _added(sums, unread)
    return SplitResult(sums.mean, perplexity(sums.mean), sums.tokens)


def _added(sums: Sums, metrics: Metrics | None) -> Sums:
    """The sums with what an evaluation found; waits for it."""
    if metrics is None:
        return sums
    return sums.add(float(metrics.loss), weight=metrics.weight, tokens=metrics.tokens)
