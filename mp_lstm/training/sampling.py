"""Drawing a word from logits: temperature, the k likeliest, the nucleus.

    logits --/ temperature, softmax--> probabilities --top_k--> --top_p--> kept ones --generator--> a word

It is done on the host in float64, one uniform number a word, so a seed gives the same words wherever the stages are.

References:
  top_k: Fan et al. 2018, https://arxiv.org/abs/1805.04833
  top_p: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from mp_lstm.errors import InputError


class Sampling(NamedTuple):
    """How a word is drawn.

    Args:
      temperature: what the logits are divided by; 0: always the likeliest word.
      top_k: only so many words, the likeliest; None: all.
      top_p: of these only the likeliest whose probabilities add up to this share, at least one; None: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


def check_sampling(sampling: Sampling) -> None:
    """Refuses numbers out of range.

    Raises:
      InputError: one is.

    Example:
      >>> check_sampling(Sampling(top_p=1.5))
      Traceback (most recent call last):
      mp_lstm.errors.InputError: top_p is 1.5, a number above 0 and at most 1 is wanted (1: all words)
    """
    temperature, top_k, top_p = sampling
    if not 0 <= temperature < np.inf:
        raise InputError(f"temperature is {temperature}, a number of at least 0 is wanted (0: the likeliest word)")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k is {top_k}, at least 1 is wanted (1: the likeliest word)")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p}, a number above 0 and at most 1 is wanted (1: all words)")


def draw(logits: Float[np.ndarray, " V"], sampling: Sampling, generator: np.random.Generator) -> int:
    """Draws an index with probability softmax(logits / temperature), among those that are kept.

    Args:
      logits: of all words.
      sampling: see there; equal logits are kept in the order of their indices.
      generator: gives one uniform number, none at temperature 0.

    Returns:
      The index.

    Example:
      >>> draw(np.array([1.0, 3.0, 2.0]), Sampling(temperature=0), np.random.default_rng(0))
      1
    """
    temperature, top_k, top_p = sampling
    if temperature == 0:
        return int(np.argmax(logits))
    shifted = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # at a tiny temperature all but the likeliest are infinitely unlikely
        shifted = (shifted - shifted.max()) / temperature
    cumulative = np.cumsum(kept(np.exp(shifted), top_k, top_p))
    # Numbers from [0, 1) have 53 bits, so the product does not round up to the sum, which no word exceeds.
    return int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))


def kept(probabilities: Float[np.ndarray, " V"], top_k: int | None, top_p: float | None) -> Float[np.ndarray, " V"]:
    """Probabilities, up to a factor, with zeros for the words that are not kept.

    Example:
      >>> kept(np.array([0.125, 0.5, 0.25, 0.125]), 3, None).tolist()
      [0.125, 0.5, 0.25, 0.0]
      >>> kept(np.array([0.125, 0.5, 0.25, 0.125]), None, 0.75).tolist()
      [0.0, 0.5, 0.25, 0.0]
    """
    if top_k is None and top_p is None:
        return probabilities
    order = np.argsort(-probabilities, kind="stable")[:top_k]
    if top_p is not None:
        cumulative = np.cumsum(probabilities[order])
        order = order[: np.searchsorted(cumulative, top_p * cumulative[-1]) + 1]
    result = np.zeros_like(probabilities)
    result[order] = probabilities[order]
    return result
