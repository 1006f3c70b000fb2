"""The bucket bill: what a list of buckets costs and saves, and the number of buckets that pays.

More buckets pad less, but each is one more set of programs to compile, and leaves one more batch that is not full. The
bill counts both in seconds against a single bucket of the longest sentence's length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mp_lstm.data.buckets import Histogram, best_up_to, check_buckets
from mp_lstm.data.checks import integer
from mp_lstm.errors import InputError


class BucketBill(NamedTuple):
    """What buckets cost; `print` shows the table.

    Args:
      buckets: their lengths.
      sentences: of each bucket.
      batches: of each bucket, the last of which may not be full.
      tokens: real tokens of each bucket.
      computed: tokens that its batches compute, padding included.
      one_bucket: tokens computed with a single bucket of the longest sentence's length.
      seconds_saved: in an epoch, against that single bucket.
      compile_seconds: for the other buckets' programs, once.
      epochs: of the run.
    """

    buckets: tuple[int, ...]
    sentences: tuple[int, ...]
    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    computed: tuple[int, ...]
    one_bucket: int
    seconds_saved: float
    compile_seconds: float
    epochs: int

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is padding."""
        return _padding(sum(self.tokens), sum(self.computed))

    @property
    def seconds_gained(self) -> float:
        """Seconds saved in the whole run, compilation paid."""
        return self.epochs * self.seconds_saved - self.compile_seconds

    def __str__(self) -> str:
        """The table and its sum."""
        columns = (self.sentences, self.batches, self.tokens, self.computed)
        total = [sum(column) for column in columns]
        lines = [f"{'bucket':>7} {'sentences':>10} {'batches':>8} {'tokens':>12} {'computed':>12} {'padding':>8}"]
        lines += [_line(str(length), *row) for length, *row in zip(self.buckets, *columns, strict=True)]
        lines.append(_line("all", *total))
        one = f"one bucket would waste {_padding(sum(self.tokens), self.one_bucket):.1%}"
        saved = f"saved {self.seconds_saved:,.1f} s an epoch, compiling +{self.compile_seconds:,.1f} s"
        return "\n".join([*lines, f"{one}; {saved}; {self.seconds_gained:+,.1f} s over {self.epochs} epochs"])


def bucket_bill(
    histogram: Histogram,
    buckets: Iterable[Any],
    *,
    batch_size: int,
    seconds_per_token: float,
    compile_seconds: float,
    epochs: int,
) -> BucketBill:
    """Works out what buckets cost and save.

    Args:
      histogram: of the sentence lengths.
      buckets: their lengths; the last holds the longest sentence (see `fit_buckets`).
      batch_size: rows of a batch. Every batch computes all its rows, also the last one of a bucket.
      seconds_per_token: of a training step, per computed token (a step's seconds / (batch_size * length)).
      compile_seconds: to compile the programs of one bucket.
      epochs: of the run.

    Returns:
      The bill.

    Raises:
      InputError: a sentence is longer than the last bucket, or a number is not positive.

    Example:
      >>> from mp_lstm.data import length_histogram
      >>> histogram = length_histogram([5] * 300 + [30] * 10)
      >>> print(bucket_bill(histogram, (5, 30), batch_size=20, seconds_per_token=1e-3, compile_seconds=4, epochs=2))
       bucket  sentences  batches       tokens     computed  padding
            5        300       15        1,500        1,500     0.0%
           30         10        1          300          600    50.0%
          all        310       16        1,800        2,100    14.3%
      one bucket would waste 81.2%; saved 7.5 s an epoch, compiling +4.0 s; +11.0 s over 2 epochs
    """
    lengths = check_buckets(buckets)
    if histogram.longest > lengths[-1]:
        raise InputError(
            f"the longest sentence has {histogram.longest} steps, the last bucket {lengths[-1]}: call fit_buckets first"
        )
    rows = integer("batch_size", batch_size)
    bucket = np.searchsorted(lengths, histogram.lengths)
    sentences = np.bincount(bucket, histogram.counts, len(lengths)).astype(np.int64)
    tokens = np.bincount(bucket, histogram.counts * histogram.lengths, len(lengths)).astype(np.int64)
    batches = -(-sentences // rows)
    computed = batches * rows * lengths
    one_bucket = -(-histogram.sentences // rows) * rows * histogram.longest
    return BucketBill(
        buckets=lengths,
        sentences=tuple(sentences.tolist()),
        batches=tuple(batches.tolist()),
        tokens=tuple(tokens.tolist()),
        computed=tuple(computed.tolist()),
        one_bucket=one_bucket,
        seconds_saved=(one_bucket - int(computed.sum())) * seconds_per_token,
        compile_seconds=compile_seconds * (np.count_nonzero(sentences) - 1),
        epochs=integer("epochs", epochs),
    )


def auto_buckets(
    histogram: Histogram,
    *,
    batch_size: int,
    seconds_per_token: float,
    compile_seconds: float,
    epochs: int,
    max_buckets: int = 8,
) -> tuple[int, ...]:
    """Chooses how many buckets, and which: the best ones of the number whose bill gains most.

    Args:
      histogram: of the sentence lengths.
      batch_size: rows of a batch.
      seconds_per_token: of a training step, per computed token.
      compile_seconds: to compile the programs of one bucket.
      epochs: of the run.
      max_buckets: the most buckets.

    Returns:
      Their lengths, increasing; the last is the longest sentence's. Where two numbers gain the same, the smaller.

    Raises:
      InputError: a number is not positive.

    Example:
      >>> from mp_lstm.data import length_histogram
      >>> histogram = length_histogram([5] * 300 + [30] * 10)
      >>> auto_buckets(histogram, batch_size=20, seconds_per_token=1e-3, compile_seconds=4, epochs=2)
      (5, 30)
      >>> auto_buckets(histogram, batch_size=20, seconds_per_token=1e-3, compile_seconds=60, epochs=2)
      (30,)
    """
    bills = (
        bucket_bill(
            histogram,
            buckets,
            batch_size=batch_size,
            seconds_per_token=seconds_per_token,
            compile_seconds=compile_seconds,
            epochs=epochs,
        )
        for buckets in best_up_to(histogram, integer("max_buckets", max_buckets))
    )
    return max(bills, key=lambda bill: bill.seconds_gained).buckets


def _padding(tokens: int, computed: int) -> float:
    return 1 - tokens / computed


def _line(bucket: str, sentences: int, batches: int, tokens: int, computed: int) -> str:
    padding = _padding(tokens, computed) if computed else 0.0
    return f"{bucket:>7} {sentences:>10,} {batches:>8,} {tokens:>12,} {computed:>12,} {padding:>8.1%}"
