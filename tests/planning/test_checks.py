"""Checks of numbers: what is one, what is in range, and how messages name what is not."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

from mp_lstm.errors import InputError
from mp_lstm.planning.checks import LEAST, MOST, number, positive, shown, whole, within


class Named(NamedTuple):
    """Like a layer: a record with a name, and much else."""

    name: str
    rest: str


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(3, 3), (np.int64(3), 3), (np.uint8(3), 3), (-1, -1), (3.0, None), (np.float32(3), None), (np.array([3]), None)]
    + [(value, None) for value in ("3", None, True, np.True_, [3])],
)
def test_whole_numbers(value: Any, wanted: int | None) -> None:
    found = whole(value)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(3, 3.0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.array(2), 2.0), (Fraction(1, 2), 0.5), (math.inf, math.inf)]
    + [(value, None) for value in ("3", b"3", None, True, 1j, [0.5], np.array([0.5]), 10**400)],
)
def test_numbers(value: Any, wanted: float | None) -> None:
    found = number(value)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "size is 0, wanted at least 1: pass a positive number"),
        (2.5, "size is 2.5, wanted an integer: pass a whole number of at least 1"),
        (True, "size is True, wanted an integer"),
        (Named("lstm", "x" * 500), "size is the Named 'lstm', wanted an integer"),
    ],
)
def test_refuses_what_is_no_positive_number(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        positive("size", value)


@pytest.mark.parametrize("value", [LEAST, 1, MOST, np.float32(MOST)])
def test_numbers_that_float32_holds(value: Any) -> None:
    assert np.isfinite(np.float32(within("rate", value, "a positive number", least=LEAST)))


@pytest.mark.parametrize("value", [0.0, LEAST / 2, 2 * MOST, -1, math.inf, math.nan, "1", None, True])
def test_refuses_numbers_out_of_range(value: Any) -> None:
    message = r"^rate is .*, a positive number is wanted: pass one that float32 holds, 1.2e-38 to 3.4e\+38$"
    with pytest.raises(InputError, match=message):
        within("rate", value, "a positive number", least=LEAST)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1e39, "1e+39"),
        ("two", "'two'"),
        ([1, 2], "[1, 2]"),
        (list(range(100)), "a list"),
        (math.sqrt, "a builtin_function_or_method"),
        (np.eye(2), "a ndarray"),
        (Named("lstm", "x" * 500), "the Named 'lstm'"),
    ],
)
def test_values_are_shown_in_one_short_line(value: Any, wanted: str) -> None:
    assert shown(value) == wanted
