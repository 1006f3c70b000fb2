"""Batch sources: batches by position, and the pass through them.

A source is a value without a state of its own. Where training is, is a position (epoch, index), two numbers that a
checkpoint keeps. The batch there is a pure function of the source, so a resumed run sees exactly what an uninterrupted
one does, and a second pass needs no reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from mp_lstm.data.checks import integer
from mp_lstm.errors import InputError
from mp_lstm.layers.batch import Batch

Position = tuple[int, int]


class Dropped(NamedTuple):
    """What a setting excludes from an epoch; `print` says it.

    Args:
      sentences: number of them.
      tokens: in all of them.
      blank: lines without words, which are no sentences.

    Example:
      >>> print(Dropped(3, 412))
      3 sentences (412 tokens) dropped
      >>> print(Dropped(blank=12))
      0 sentences (0 tokens) dropped, 12 blank lines skipped
    """

    sentences: int = 0
    tokens: int = 0
    blank: int = 0

    def __str__(self) -> str:
        skipped = f", {self.blank:,} blank lines skipped" if self.blank else ""
        return f"{self.sentences:,} sentences ({self.tokens:,} tokens) dropped{skipped}"


@runtime_checkable
class BatchSource(Protocol):
    """What gives batches by position."""

    @property
    def tokens(self) -> int:
        """Real targets of an epoch."""
        ...

    @property
    def dropped(self) -> Dropped:
        """What an epoch leaves out."""
        ...

    @property
    def buckets(self) -> Sequence[int]:
        """The padded lengths of its batches, increasing."""
        ...

    def num_batches(self, epoch: int = 0) -> int:
        """The number of batches of an epoch, at least one."""
        ...

    def counts(self) -> dict[int, int]:
        """The number of batches of each padded length in an epoch."""
        ...

    def batch(self, epoch: int, index: int) -> Batch:
        """The batch of a position: new arrays, never written to again."""
        ...


def iterate(
    source: BatchSource, *, start: Sequence[int] = (0, 0), epochs: int | None = None
) -> Iterator[tuple[Position, Batch]]:
    """Goes through the batches of a source.

    Args:
      source: where they come from.
      start: position (epoch, index) of the first batch: one that an earlier pass gave.
      epochs: stop before this epoch; None: never. It counts from the first epoch of the run, not from `start`.

    Returns:
      An iterator over the position after each batch, where a later pass continues, and the batch.

    Raises:
      InputError: the source has no such position; the epochs are no whole number of at least 0.

    Example:
      >>> from mp_lstm.data import ContiguousBatches, load_austen
      >>> source = ContiguousBatches(load_austen().valid, length=20, batch_size=1000)
      >>> [position for position, _ in iterate(source, start=(1, 1), epochs=2)]
      [(1, 2), (2, 0)]
    """
    epoch, index = (integer("a position", number, 0) for number in start)
    if index > source.num_batches(epoch):
        raise InputError(
            f"the position is batch {index} of epoch {epoch}, which has {source.num_batches(epoch)} batches: "
            "continue with the data settings of the run that gave it"
        )
    return _walk(source, epoch, index, None if epochs is None else integer("epochs", epochs, 0))


def _walk(source: BatchSource, epoch: int, index: int, epochs: int | None) -> Iterator[tuple[Position, Batch]]:
    while epochs is None or epoch < epochs:
        count = source.num_batches(epoch)
        for at in range(index, count):
            after = (epoch, at + 1) if at + 1 < count else (epoch + 1, 0)
            yield after, source.batch(epoch, at)
        epoch, index = epoch + 1, 0


def check_index(index: int, count: int) -> None:
    """Refuses a batch that an epoch does not have; sources call it.

    Raises:
      IndexError: the index is negative, or not below the count.

    Example:
      >>> check_index(3, 4)
    """
    if not 0 <= index < count:
        raise IndexError(f"batch {index} of an epoch of {count}")
