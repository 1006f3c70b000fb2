"""The order of an epoch: rows permuted within their bucket, cut into batches, and these permuted together.

It is a function of (seed, epoch), drawn from the raw stream of a bit generator, which numpy promises to keep;
`Generator.permutation` may change with numpy's version, and a resumed run would change with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

Permutations = Callable[[int], np.ndarray]


class EpochOrder(NamedTuple):
    """The batches of an epoch.

    Args:
      rows: [batches, B] rows of each batch; R, one past the last row, where a batch is short.
      lengths: [batches] the padded length of each.
    """

    rows: Integer[np.ndarray, "batches B"]
    lengths: Integer[np.ndarray, " batches"]


def epoch_order(
    lengths: Integer[np.ndarray, " R"], buckets: Sequence[int], batch_size: int, permutations: Permutations
) -> EpochOrder:
    """Orders the rows of an epoch.

    Args:
      lengths: [R] steps of each row.
      buckets: padded lengths, increasing; the last holds the longest row.
      batch_size: B.
      permutations: gives a permutation of 0 .. n-1 for n, see `seeded`; `np.arange` keeps the order.

    Returns:
      The order: every row once, each batch of one bucket.

    Example:
      >>> order = epoch_order(np.array([9, 2, 3, 1]), (4, 10), 2, np.arange)
      >>> order.rows.tolist(), order.lengths.tolist()
      ([[1, 2], [3, 4], [0, 4]], [4, 4, 10])
    """
    # (1) permute the rows, (2) sort them by bucket, otherwise as permuted, (3) cut, (4) permute the batches.
    bucket = np.searchsorted(buckets, lengths)
    rows = permutations(len(lengths))
    rows = rows[np.argsort(bucket[rows], kind="stable")]
    sizes = np.bincount(bucket, minlength=len(buckets))
    batches = _cut(rows, sizes, batch_size)
    times = np.repeat(buckets, -(-sizes // batch_size))
    order = permutations(len(batches))
    return EpochOrder(batches[order], times[order])


def seeded(seed: int, epoch: int) -> Permutations:
    """Makes a source of random permutations, each call another one.

    Example:
      >>> permutations = seeded(0, 3)
      >>> bool((permutations(50) == seeded(0, 3)(50)).all()), bool((permutations(50) == seeded(0, 3)(50)).all())
      (True, False)
    """
    stream = np.random.PCG64([seed, epoch])
    return lambda n: np.argsort(stream.random_raw(n), kind="stable")


def _cut(rows: np.ndarray, sizes: np.ndarray, batch_size: int) -> np.ndarray:
    """Batches [batches, B] of rows that are sorted by bucket; each bucket begins a new batch."""
    batches = -(-sizes // batch_size)
    first_slot = (np.cumsum(batches) - batches) * batch_size
    first_row = np.cumsum(sizes) - sizes
    table = np.full(int(batches.sum()) * batch_size, len(rows))
    table[np.arange(len(rows)) + np.repeat(first_slot - first_row, sizes)] = rows
    return table.reshape(-1, batch_size)
