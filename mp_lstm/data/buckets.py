"""Bucket lengths: which ones waste least, and what becomes of longer sentences.

A sentence is padded to the first bucket that holds it. For k buckets the lengths that waste least are found exactly.
Of c_1 .. c_n sentences with the lengths l_1 < .. < l_n, the first j need in k buckets no more padded tokens than

    best_k(j) = min over i < j of best_(k-1)(i) + (c_(i+1) + .. + c_j) l_j        best_k(0) = 0

because the last of these buckets has length l_j and takes all lengths after l_i. This is O(k n^2), in O(k n) numpy
expressions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from mp_lstm.data.checks import integer
from mp_lstm.errors import InputError

POLICIES = ("extend", "split", "drop")
MAX_ADDED = 2
_BARS, _BAR_WIDTH = 12, 40


class Histogram(NamedTuple):
    """How many sentences have which length; `print` draws it.

    Args:
      lengths: [n] the lengths that occur, increasing.
      counts: [n] sentences of each.
    """

    lengths: Int64[np.ndarray, " n"]
    counts: Int64[np.ndarray, " n"]

    @property
    def longest(self) -> int:
        """The length of the longest sentence."""
        return int(self.lengths[-1])

    @property
    def sentences(self) -> int:
        """The number of sentences."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """The sum of their lengths."""
        return int(self.lengths @ self.counts)

    def __str__(self) -> str:
        """Draws it with about a dozen ranges of lengths, a line each."""
        width = -(-self.longest // _BARS)
        counts = np.bincount((self.lengths - 1) // width, self.counts).astype(int)
        lines = [f"{'length':>11} {'sentences':>10}"]
        for index, count in enumerate(counts.tolist()):
            span = f"{index * width + 1}-{(index + 1) * width}"
            bar = "#" * -(-_BAR_WIDTH * count // int(counts.max()))
            lines.append(f"{span:>11} {count:>10,} {bar}".rstrip())
        return "\n".join(lines)


def length_histogram(lengths: Integer[np.ndarray, " sentences"] | Iterable[int]) -> Histogram:
    """Counts sentences by length.

    Args:
      lengths: steps of each sentence.

    Returns:
      The histogram.

    Raises:
      InputError: there are no sentences, or one has no steps.

    Example:
      >>> print(length_histogram([3, 5, 3, 2]))
           length  sentences
              1-1          0
              2-2          1 ####################
              3-3          2 ########################################
              4-4          0
              5-5          1 ####################
    """
    lengths = lengths if isinstance(lengths, np.ndarray) else np.array(list(lengths), np.int64)
    if lengths.size == 0:
        raise InputError("there are no sentences to batch: pass a text with at least one")
    if lengths.min() < 1:
        raise InputError(f"sentence {int(lengths.argmin())} has no steps: leave empty ones out")
    values, counts = np.unique(lengths, return_counts=True)
    return Histogram(values.astype(np.int64), counts.astype(np.int64))


def best_buckets(histogram: Histogram, k: int) -> tuple[int, ...]:
    """Finds the k bucket lengths that waste least.

    Args:
      histogram: of the sentence lengths.
      k: number of buckets; no more are given than there are different lengths.

    Returns:
      The lengths, increasing; the last is the longest sentence's.

    Raises:
      InputError: k is not positive.

    References:
      The segmentation by dynamic programming is R. Bellman, "On the approximation of curves by line segments using
      dynamic programming", 1961.

    Example:
      >>> best_buckets(length_histogram([2, 3, 3, 9, 10]), 2)
      (3, 10)
    """
    return best_up_to(histogram, k)[-1]


def best_up_to(histogram: Histogram, k: int) -> list[tuple[int, ...]]:
    """Finds the best bucket lengths for 1 .. k buckets at once.

    Args:
      histogram: of the sentence lengths.
      k: the largest number of buckets.

    Returns:
      The lengths for 1 bucket, for 2, and so on to k or the number of different lengths.

    Raises:
      InputError: k is not positive.

    Example:
      >>> best_up_to(length_histogram([2, 3, 3, 9, 10]), 9)
      [(10,), (3, 10), (2, 3, 10), (2, 3, 9, 10)]
    """
    n = len(histogram.lengths)
    k = min(integer("the number of buckets", k), n)
    upto = np.concatenate(([0], np.cumsum(histogram.counts)))
    best = np.full(n + 1, 2**62)  # no bucket yet: only "nothing" costs nothing
    best[0] = 0
    last = np.zeros((k, n + 1), np.int64)
    for used in range(k):
        before = best.copy()
        for j, length in enumerate(histogram.lengths.tolist(), 1):
            padded = before[:j] + (upto[j] - upto[:j]) * length
            last[used, j] = padded.argmin()
            best[j] = padded[last[used, j]]
    return [_walk_back(histogram.lengths, last[:used]) for used in range(1, k + 1)]


def _walk_back(lengths: np.ndarray, last: np.ndarray) -> tuple[int, ...]:
    found, j = [], len(lengths)
    for choice in last[::-1]:
        found.append(int(lengths[j - 1]))
        j = int(choice[j])
    return tuple(found[::-1])


def check_buckets(buckets: Iterable[Any]) -> tuple[int, ...]:
    """Checks bucket lengths given by hand.

    Args:
      buckets: in any order, also twice; it is not changed.

    Returns:
      The lengths, increasing, each once.

    Raises:
      InputError: there are none, or one is no positive integer.

    Example:
      >>> check_buckets([16, 8, 16])
      (8, 16)
    """
    lengths = tuple(sorted({integer("a bucket", length) for length in buckets}))
    if not lengths:
        raise InputError("buckets is empty, wanted the padded lengths of the batches: pass e.g. (8, 16, 32) or 'auto'")
    return lengths


def fit_buckets(histogram: Histogram, buckets: Iterable[Any], policy: str = "extend") -> tuple[int, ...]:
    """Fits bucket lengths to the sentences there are.

    Args:
      histogram: of the sentence lengths.
      buckets: lengths in any order; they are not changed.
      policy: what becomes of sentences longer than the last bucket. "extend": they get up to two buckets of their own,
        those that waste least. "split": they are cut into pieces of the last bucket's length and a rest. "drop": they
        are left out.

    Returns:
      The lengths, increasing, without buckets that would be empty.

    Raises:
      InputError: the buckets are no positive integers, the policy is none of these, or "drop" drops everything.

    Example:
      >>> histogram = length_histogram([2, 7, 30, 70])
      >>> fit_buckets(histogram, [4, 8, 16])
      (4, 8, 30, 70)
      >>> fit_buckets(histogram, [4, 8, 16], "split"), fit_buckets(histogram, [4, 8, 16], "drop")
      ((4, 8, 16), (4, 8))
    """
    lengths = check_buckets(buckets)
    long = histogram.lengths > lengths[-1]
    kept = Histogram(histogram.lengths[~long], histogram.counts[~long])
    if policy == "extend":
        kept = histogram
        if long.any():
            lengths += best_buckets(Histogram(histogram.lengths[long], histogram.counts[long]), MAX_ADDED)
    elif policy == "split":
        kept = piece_histogram(histogram, lengths[-1])
    elif policy != "drop":
        raise InputError(f"the policy for long sentences is {policy!r}: pass one of {', '.join(POLICIES)}")
    if not kept.lengths.size:
        raise InputError(
            f"all {histogram.sentences} sentences are longer than the last bucket, {lengths[-1]}, and are dropped: "
            f"pass a longer one (the longest sentence has {histogram.longest} steps) or the policy 'extend'"
        )
    return tuple(lengths[index] for index in np.unique(np.searchsorted(lengths, kept.lengths)))


def piece_histogram(histogram: Histogram, longest: int) -> Histogram:
    """Counts the pieces of sentences that are cut to a length.

    Args:
      histogram: of the sentence lengths.
      longest: the length of a full piece.

    Returns:
      The histogram of the pieces; it has the same number of tokens.

    Example:
      >>> piece_histogram(length_histogram([2, 7, 8]), 4)
      Histogram(lengths=array([2, 3, 4]), counts=array([1, 1, 3]))
    """
    counts = np.zeros(longest + 1, np.int64)
    np.add.at(counts, histogram.lengths % longest, histogram.counts)
    counts[0], counts[longest] = 0, (histogram.lengths // longest) @ histogram.counts
    (lengths,) = counts.nonzero()
    return Histogram(lengths, counts[lengths])
