"""Which consecutive rows form a stage: the split whose largest stage is smallest.

A pipeline runs at the pace of its largest stage, so `balanced` minimises that one exactly, by dynamic programming over
all contiguous splits; among the splits that reach the minimum it takes the most even one. The same table is filled
twice, each row of it by one numpy expression: 1,000 rows in 64 stages take about a second.

This is not yet a search over predicted step times: unequal devices, transfers and memory do not enter here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import SupportsIndex

import numpy as np

from mp_lstm.errors import InputError

TIE = 1 + 1e-12  # sums that differ by rounding are equal


def balanced(costs: Sequence[int] | Sequence[float], stages: int) -> tuple[int, ...]:
    """Splits rows into consecutive stages so that the largest stage is as small as can be.

    Among the splits that reach this minimum, the one with the least sum of squared stage costs is taken (the most even
    one), and among equally even ones that with more rows in earlier stages. Every stage has at least one row.

    Args:
      costs: cost of each row, finite and not negative.
      stages: number of stages, at most the number of rows.

    Returns:
      Rows of each stage.

    Raises:
      InputError: there are fewer rows than stages, or a cost is negative or not finite.

    Example:
      >>> balanced([1, 1, 1, 1, 1, 5], 3)
      (3, 2, 1)
    """
    check_stages(stages, len(costs))
    loads = _loads(costs)
    # (1) the least possible largest stage, (2) the most even split within it.
    _, largest = _split(loads, stages, np.maximum)
    partition, _ = _split(np.where(loads <= largest * TIE, loads**2, np.inf), stages, np.add)
    return partition


def even(rows: int, stages: int) -> tuple[int, ...]:
    """Splits rows into stages of equal size, the first ones larger by one where they do not divide.

    Example:
      >>> even(10, 4)
      (3, 3, 2, 2)
    """
    return tuple(rows // stages + (stage < rows % stages) for stage in range(stages))


def check_partition(partition: Sequence[SupportsIndex], rows: int) -> tuple[int, ...]:
    """Checks a partition given by hand.

    Args:
      partition: rows of each stage, as ints or numpy ints.
      rows: rows of the model.

    Returns:
      The partition as a tuple of ints.

    Raises:
      InputError: it is empty, has a stage without rows or something other than integers, or does not add up.

    Example:
      >>> check_partition([2, 3], 5)
      (2, 3)
    """
    try:
        sizes = tuple(operator.index(size) for size in partition)
    except TypeError:
        raise InputError(
            f"partition is {partition!r}, wanted the number of layers of each stage: pass a tuple of integers or 'auto'"
        ) from None
    if not sizes:
        raise InputError(f"partition is empty, the model has {rows} layers: pass partition=({rows},) or 'auto'")
    check_stages(len(sizes), rows)
    remedy = f"pass partition={even(rows, len(sizes))} or 'auto'"
    for stage, size in enumerate(sizes):
        if size < 1:
            raise InputError(f"partition gives stage {stage} {size} layers, wanted at least 1: {remedy}")
    if sum(sizes) != rows:
        terms = "+".join(map(str, sizes))
        raise InputError(f"partition gives {sum(sizes)} layers ({terms}), the model has {rows}: {remedy}")
    return sizes


def check_stages(stages: int, rows: int) -> None:
    """Checks that every stage can have a row.

    Raises:
      InputError: there is no stage, or there are more stages than rows.
    """
    if stages < 1:
        raise InputError(f"stages is {stages}, wanted at least 1: pass stages=1 for one device")
    if stages > rows:
        raise InputError(f"{stages} stages for a model of {rows} placement rows: pass at most stages={rows}")


def _loads(costs: Sequence[int] | Sequence[float]) -> np.ndarray:
    """[R, R+1] cost of the rows i to j-1, infinite where there are none.

    In units of the largest cost; where all are zero, every row counts alike.
    """
    values = np.asarray(costs, np.float64)
    for row, value in enumerate(values.tolist()):
        if not 0 <= value < np.inf:
            raise InputError(f"cost of row {row} is {value}, wanted finite and not negative: check its layer's cost")
    values = values / values.max() if values.max() > 0 else np.ones_like(values)
    loads = np.full((len(values), len(values) + 1), np.inf)
    for first in range(len(values)):
        loads[first, first + 1 :] = np.cumsum(values[first:])
    return loads


def _split(
    loads: np.ndarray, stages: int, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[tuple[int, ...], float]:
    """The contiguous split of least combined load, and that load; of equal ones the last stages are shortest."""
    rows = len(loads)
    best = np.full(rows + 1, np.inf)  # best[j]: of the first j rows, in the stages so far
    best[0] = 0.0
    choices = []
    for _ in range(stages):
        candidates = combine(best[:-1, None], loads)[::-1]  # [R, R+1] by the stage's first row, the last one first
        best = candidates.min(axis=0)
        choice = (candidates <= best * TIE).argmax(axis=0)
        choices.append(rows - 1 - choice)
    ends = [rows]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return tuple(np.diff(ends[::-1]).tolist()), float(best[rows])
