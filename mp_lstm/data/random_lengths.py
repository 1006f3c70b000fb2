"""Consecutive text cut at random lengths, so that no word is always the last of a batch.

A batch of any length would need programs of its own, so lengths are rounded to multiples of a number: they are few, and
where chunks have that size, they share most programs.

    drawn once, by the seed     [70 70 60 80 30 70 ...]     until the text is used up
    epoch e                     the same in another order   but for the last, which takes what is left

So all epochs have the same number of batches, and each begins its batches at other words. A batch is a function of its
position alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from mp_lstm.data.batches import ContiguousBatches
from mp_lstm.data.checks import integer
from mp_lstm.data.order import seeded
from mp_lstm.data.source import check_index
from mp_lstm.errors import InputError

WHOLE = 0.95
"""Share of the lengths that are drawn around T; the others around half of it."""
DEVIATION = 5.0
MOST = 3 * DEVIATION
"""Lengths further off than this are drawn in to it, so that there is a longest one."""
LEAST = 5


@dataclass(frozen=True, eq=False)
class RandomLengthBatches(ContiguousBatches):
    """Rows of consecutive text, cut at random lengths.

    A length is drawn from normal(T, 5) with probability 0.95, else from normal(T / 2, 5), by at most 15 off and at
    least 5, then rounded to a multiple of `multiple`. There are at most `2 * (30 // multiple + 2)` different ones.

    Args:
      split, length, batch_size: as in `ContiguousBatches`; T is `length`.
      multiple: of which all lengths are multiples.
      seed: of the lengths and their order.

    Raises:
      InputError: as in `ContiguousBatches`; a multiple that is longer than T.

    References:
      Merity, Keskar and Socher 2017, section 5 (https://arxiv.org/abs/1708.02182), where lengths are not rounded.

    Example:
      >>> from mp_lstm.data import load_austen
      >>> source = RandomLengthBatches(load_austen().valid, length=70, batch_size=20, multiple=10)
      >>> source.buckets, source.num_batches(), source.batch(0, 3).inputs.shape
      ((30, 60, 70, 80), 36, (70, 20))
    """

    multiple: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("multiple", self.multiple)
        if self.multiple > self.length:
            raise InputError(f"multiple is {self.multiple}, wanted at most the length, which is {self.length}")
        integer("seed", self.seed, 0)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The lengths that occur, increasing."""
        return tuple(sorted(set(self._drawn.tolist())))

    def num_batches(self, epoch: int = 0) -> int:
        """The number of batches of an epoch; all epochs have the same."""
        del epoch
        return len(self._drawn)

    def counts(self) -> dict[int, int]:
        """The number of batches of each length; all epochs have the same."""
        return dict(sorted(Counter(self._drawn.tolist()).items()))

    def _cut(self, epoch: int, index: int) -> tuple[int, int]:
        check_index(index, self.num_batches())
        ends = self._ends(epoch)
        begin = int(ends[index - 1]) if index else 0
        return begin, int(ends[index]) - begin

    @functools.cached_property
    def _drawn(self) -> np.ndarray:
        """The lengths: at least the text's together, and less without the last."""
        stream, left, drawn = np.random.PCG64([self.seed, 1]), int(self._rows.lengths[0]), []
        while left > 0:
            chance, place = ((stream.random_raw(2) >> np.uint64(11)) + 0.5) / 2**53
            drawn.append(self._rounded(self.length / (1 if chance < WHOLE else 2), place))
            left -= drawn[-1]
        last = left + drawn[-1]
        drawn[-1] = min((length for length in drawn if length >= last), default=drawn[-1])
        return np.array(drawn)

    def _rounded(self, mean: float, place: float) -> int:
        """The length at a place (a probability) of the distribution around a mean."""
        off = min(max(NormalDist(0, DEVIATION).inv_cdf(place), -MOST), MOST)
        return max(int(max(mean + off, LEAST) / self.multiple + 0.5), 1) * self.multiple

    @functools.cached_property
    def _ends(self) -> Callable[[int], np.ndarray]:
        def ends(epoch: int) -> np.ndarray:
            order = seeded(self.seed, epoch)(len(self._drawn) - 1)
            return np.cumsum(np.append(self._drawn[:-1][order], self._drawn[-1]))

        # Two are kept: while one epoch ends, the first batches of the next are already being made.
        return functools.lru_cache(maxsize=2)(ends)
