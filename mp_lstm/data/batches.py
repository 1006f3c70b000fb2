"""The two ways to make batches of a text, and of any other sequences.

    SentenceBatches     a sentence a row, padded to its bucket; no state is carried
    ContiguousBatches   B rows of consecutive text, cut every T steps; the state is carried from batch to batch

Nothing is lost in either: short last batches have rows of length 0, and what the policy "drop" leaves out is counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from mp_lstm.data.buckets import Histogram, fit_buckets, length_histogram
from mp_lstm.data.checks import integer
from mp_lstm.data.corpus import SPLITS, Split, load_austen
from mp_lstm.data.order import EpochOrder, epoch_order, seeded
from mp_lstm.data.sequences import Sequences, Tree, gather, join_sequences
from mp_lstm.data.source import Dropped, check_index, iterate
from mp_lstm.errors import InputError
from mp_lstm.layers.batch import Batch


class _Rows(NamedTuple):
    """Slices of the flat arrays."""

    starts: Int64[np.ndarray, " R"]
    lengths: Int64[np.ndarray, " R"]


@dataclass(frozen=True, eq=False)
class SentenceBatches:
    """Sentences in batches of their bucket's length.

    In each epoch sentences are permuted within their bucket, cut into batches, and the batches of all buckets permuted
    together. Sentences may be any sequences (see `sequence_batches`). Blank lines of a text are skipped.

    Args:
      split: the sentences.
      buckets: padded lengths, in any order; afterwards those in use, increasing.
      batch_size: B, rows of a batch.
      seed: of the order.
      policy: what becomes of sentences longer than the last bucket, see `fit_buckets`. Pieces of a split sentence are
        rows of their own; the first step of each reads the last token of the piece before.
      shuffle: False: from the shortest bucket to the longest, in the order of the text.

    Attributes:
      histogram: of the sentence lengths.
      dropped: what the policy "drop" leaves out, and how many blank lines there are.

    Raises:
      InputError: there are no sentences, or a setting is out of range.

    Example:
      >>> source = SentenceBatches(load_austen().valid, (8, 16, 32, 64), 20)
      >>> source.buckets, source.tokens, source.num_batches(), source.dropped.sentences
      ((8, 16, 32, 64, 111, 281), 46818, 81, 0)
      >>> source.batch(0, 5).inputs.shape
      (64, 20)
    """

    split: Split | Sequences
    buckets: Sequence[int]
    batch_size: int
    seed: int = 0
    policy: str = "extend"
    shuffle: bool = True
    histogram: Histogram = field(init=False)
    dropped: Dropped = field(init=False)

    def __post_init__(self) -> None:
        integer("batch_size", self.batch_size)
        integer("seed", self.seed, 0)
        sentences = self.split.sentences if isinstance(self.split, Split) else self.split
        blank = len(self.split.offsets) - len(sentences.offsets)
        lengths = np.diff(sentences.offsets)
        histogram = length_histogram(lengths)
        buckets = fit_buckets(histogram, self.buckets, self.policy)
        long = lengths[lengths > buckets[-1]] if self.policy == "drop" else lengths[:0]
        dropped = Dropped(long.size, int(long.sum()), blank)
        found = {"split": sentences, "buckets": buckets, "histogram": histogram, "dropped": dropped}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def tokens(self) -> int:
        """Real targets of an epoch."""
        return self.histogram.tokens - self.dropped.tokens

    def num_batches(self, epoch: int = 0) -> int:
        """The number of batches of an epoch; all epochs have the same."""
        return len(self._order(epoch).lengths)

    def counts(self) -> dict[int, int]:
        """The number of batches of each bucket; all epochs have the same."""
        return dict(sorted(Counter(map(int, self._order(0).lengths)).items()))

    def batch(self, epoch: int, index: int) -> Batch:
        """Makes the batch of a position.

        Args:
          epoch: from 0.
          index: from 0, in the order of the epoch.

        Returns:
          The batch: inputs and targets [T, B, ...] with T the bucket, lengths [B].

        Raises:
          IndexError: the epoch has no such batch.
        """
        order = self._order(epoch)
        check_index(index, len(order.lengths))
        rows = order.rows[index]
        starts, lengths = self._rows
        return gather(*self._flat, starts[rows], lengths[rows], int(order.lengths[index]))

    @functools.cached_property
    def _flat(self) -> tuple[Tree, Tree]:
        return self.split.inputs, self.split.targets

    @functools.cached_property
    def _rows(self) -> _Rows:
        """The sentences, or their pieces, and then an empty row, which fills short batches."""
        starts, lengths = _cut(self.split.offsets, self.buckets[-1], self.policy)
        return _Rows(np.append(starts, 0), np.append(lengths, 0))

    @functools.cached_property
    def _order(self) -> Callable[[int], EpochOrder]:
        def order(epoch: int) -> EpochOrder:
            permutations = seeded(self.seed, epoch) if self.shuffle else np.arange
            return epoch_order(self._rows.lengths[:-1], self.buckets, self.batch_size, permutations)

        # Two are kept: while one epoch ends, the first batches of the next are already being made.
        return functools.lru_cache(maxsize=2)(order)


@dataclass(frozen=True, eq=False)
class ContiguousBatches:
    """Rows of consecutive text, whose state is carried from batch to batch.

    The text is cut into B parts whose lengths differ by at most one, and these every T steps. The first step of a row
    reads the token before it. Only the first batch of an epoch resets the state.

    Args:
      split: the text.
      length: T, steps of a batch.
      batch_size: B, rows of a batch.

    Raises:
      InputError: there is no text, or a number is not positive.

    Example:
      >>> split = Split(np.array([5, 6, 0, 7, 0], np.int32), np.array([0, 3, 5]))
      >>> source = ContiguousBatches(split, length=2, batch_size=2)
      >>> [source.batch(0, index).targets.T.tolist() for index in range(source.num_batches())]
      [[[5, 6], [7, 0]], [[0, 0], [0, 0]]]
      >>> source.batch(0, 1).lengths
      array([1, 0], dtype=int32)
    """

    split: Split | Sequences
    length: int
    batch_size: int

    def __post_init__(self) -> None:
        integer("length", self.length)
        integer("batch_size", self.batch_size)
        if self.tokens == 0:
            raise InputError("there is no text to batch: pass one with at least one sentence")

    @property
    def buckets(self) -> tuple[int, ...]:
        """The one padded length."""
        return (self.length,)

    @property
    def tokens(self) -> int:
        """Real targets of an epoch."""
        return int(self.split.offsets[-1])

    @property
    def dropped(self) -> Dropped:
        """Nothing is."""
        return Dropped()

    def num_batches(self, epoch: int = 0) -> int:
        """The number of batches of an epoch; all epochs are the same."""
        del epoch
        return -(-int(self._rows.lengths[0]) // self.length)

    def counts(self) -> dict[int, int]:
        """All batches are of one length."""
        return {self.length: self.num_batches()}

    def batch(self, epoch: int, index: int) -> Batch:
        """Makes the batch of a position.

        Args:
          epoch: from 0.
          index: from 0, along the text.

        Returns:
          The batch: inputs and targets [T, B, ...], lengths [B], resets [B].

        Raises:
          IndexError: the epoch has no such batch.
        """
        done, time = self._cut(epoch, index)
        starts, lengths = self._rows
        left = np.clip(lengths - done, 0, time)
        return gather(*self._flat, starts + done, left, time, np.full(self.batch_size, index == 0))

    def _cut(self, epoch: int, index: int) -> tuple[int, int]:
        """Steps of each row before a batch, and in it."""
        check_index(index, self.num_batches(epoch))
        return index * self.length, self.length

    @functools.cached_property
    def _flat(self) -> tuple[Tree, Tree]:
        return self.split.inputs, self.split.targets

    @functools.cached_property
    def _rows(self) -> _Rows:
        each, rest = divmod(self.tokens, self.batch_size)
        lengths = each + (np.arange(self.batch_size) < rest)
        return _Rows(np.cumsum(lengths) - lengths, lengths)


def sequence_batches(
    inputs: Sequence[Tree],
    targets: Sequence[Tree],
    buckets: Sequence[int],
    batch_size: int,
    *,
    seed: int = 0,
    policy: str = "extend",
    shuffle: bool = True,
) -> SentenceBatches:
    """Batches sequences of any features, such as dense ones, in the same way as sentences.

    Args:
      inputs: of each sequence, a pytree of [t, ...] arrays.
      targets: of each sequence, a pytree of [t, ...] arrays: one target for each step.
      buckets: as in `SentenceBatches`.
      batch_size: B, rows of a batch.
      seed: of the order.
      policy: as in `SentenceBatches`.
      shuffle: as in `SentenceBatches`.

    Returns:
      The source.

    Raises:
      InputError: there are none, their structures or lengths do not agree, or a setting is out of range.

    Example:
      >>> frames = [np.ones((t, 40), np.float32) for t in (5, 7, 3)]
      >>> labels = [np.zeros(t, np.int32) for t in (5, 7, 3)]
      >>> batch = sequence_batches(frames, labels, (4, 8), 2).batch(0, 0)
      >>> batch.inputs.shape[1:], batch.targets.shape[1:]
      ((2, 40), (2,))
    """
    return SentenceBatches(join_sequences(inputs, targets), buckets, batch_size, seed, policy, shuffle)


@runtime_checkable
class Planned(Protocol):
    """What batches need to know of a plan."""

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        ...

    @property
    def buckets(self) -> Mapping[int, Any]:
        """By padded length."""
        ...


def austen(plan: Planned, *, epochs: int = 1, split: str = "train", seed: int = 0) -> Iterator[Batch]:
    """Batches of the corpus that comes with the package, in the shapes of a plan.

    Args:
      plan: has the batch size and the bucket lengths. Sentences longer than the last bucket are split.
      epochs: how many.
      split: "train", "valid" or "test".
      seed: of the order.

    Returns:
      An iterator over the batches, sentences as their rows.

    Raises:
      InputError: there is no such split.

    Example:
      >>> from types import SimpleNamespace
      >>> plan = SimpleNamespace(batch_size=20, buckets={8: None, 16: None, 32: None, 64: None})
      >>> int(sum(batch.lengths.sum() for batch in austen(plan, split="test")))
      50055
    """
    if split not in SPLITS:
        raise InputError(f"split is {split!r}: pass one of {', '.join(SPLITS)}")
    sentences = getattr(load_austen(), split)
    source = SentenceBatches(sentences, tuple(plan.buckets), plan.batch_size, seed, "split")
    return (batch for _, batch in iterate(source, epochs=epochs))


def _cut(offsets: np.ndarray, longest: int, policy: str) -> _Rows:
    """The rows of sentences: dropped, or cut where they are longer than `longest`."""
    starts, ends = offsets[:-1], offsets[1:]
    if policy == "drop":
        kept = ends - starts <= longest
        starts, ends = starts[kept], ends[kept]
    pieces = -(-(ends - starts) // longest)
    place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = np.repeat(starts, pieces) + place * longest
    return _Rows(first, np.minimum(np.repeat(ends, pieces) - first, longest))
