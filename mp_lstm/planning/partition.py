"""Which consecutive rows form a stage: all contiguous splits, the best of them, and their neighbours.

A pipeline runs at the pace of its largest stage, so `balanced` minimises that one exactly, by dynamic programming over
all contiguous splits; among the splits that reach the minimum it takes the most even one. `least` is the same program
over loads that differ by stage, as those of unequal devices do. Each row of its table is one numpy expression: 1,000
rows in 64 stages take about a second.

What a step takes is no maximum over stages: the pipeline fills and drains, transfers delay. So the search simulates
every split of `splits` where these are few, and else starts from `least` and goes on to `neighbours`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import combinations
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
    _, largest = _split(lambda stage: loads, stages, np.maximum)
    squares = np.where(loads <= largest * TIE, loads**2, np.inf)
    partition, _ = _split(lambda stage: squares, stages, np.add)
    return partition


def least(loads: Callable[[int], np.ndarray], stages: int) -> tuple[tuple[int, ...], float]:
    """Splits rows into stages so that the largest load is least, loads being any numbers.

    Args:
      loads: stage -> [R, R+1] load of that stage if it holds the rows i to j-1; infinite where it cannot.
      stages: number of stages.

    Returns:
      Rows of each stage, and the largest load; it is infinite where no split will do.

    Example:
      >>> rows = np.array([[np.inf, 1.0, 2.0, 3.0], [np.inf, np.inf, 1.0, 2.0], [np.inf, np.inf, np.inf, 1.0]])
      >>> least(lambda stage: rows * (1, 3)[stage], 2)
      ((2, 1), 3.0)
    """
    return _split(loads, stages, np.maximum)


def splits(rows: int, stages: int) -> np.ndarray:
    """Lists all contiguous splits.

    Returns:
      [K, S+1] for each split where its stages begin, and the number of rows; more rows in earlier stages come first.

    Example:
      >>> splits(4, 2).tolist()
      [[0, 3, 4], [0, 2, 4], [0, 1, 4]]
    """
    inner = list(combinations(range(1, rows), stages - 1))[::-1]
    ends = np.zeros((len(inner), stages + 1), np.int64)
    ends[:, 1:-1] = np.array(inner, np.int64).reshape(len(inner), stages - 1)
    ends[:, -1] = rows
    return ends


def neighbours(ends: np.ndarray) -> np.ndarray:
    """Lists the splits that move one row over one boundary.

    Args:
      ends: [S+1] a split, as `splits` gives it.

    Returns:
      [K, S+1].

    Example:
      >>> neighbours(np.array([0, 2, 3, 4])).tolist()
      [[0, 1, 3, 4]]
    """
    moves = np.zeros((2 * (len(ends) - 2), len(ends)), np.int64)
    boundaries = np.arange(1, len(ends) - 1)
    moves[::2][boundaries - 1, boundaries], moves[1::2][boundaries - 1, boundaries] = 1, -1
    moved = ends + moves
    return moved[(np.diff(moved, axis=1) > 0).all(axis=1)]


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
    loads: Callable[[int], np.ndarray], stages: int, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[tuple[int, ...], float]:
    """The contiguous split of least combined load, and that load; of equal ones the last stages are shortest."""
    rows = len(loads(0))
    best = np.full(rows + 1, np.inf)  # best[j]: of the first j rows, in the stages so far
    best[0] = -np.inf if combine is np.maximum else 0.0
    choices = []
    for stage in range(stages):
        candidates = combine(best[:-1, None], loads(stage))[::-1]  # [R, R+1] by first row, the last one first
        best = candidates.min(axis=0)
        choice = (candidates <= best + abs(best) * (TIE - 1)).argmax(axis=0)
        choices.append(rows - 1 - choice)
    ends = [rows]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return tuple(np.diff(ends[::-1]).tolist()), float(best[rows])
