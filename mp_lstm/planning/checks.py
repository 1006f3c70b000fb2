"""Checks of numbers that are given."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from mp_lstm.errors import InputError


def positive(name: str, value: SupportsIndex) -> int:
    """A whole number of at least 1.

    Args:
      name: of the argument, for the message.
      value: as it was given.

    Raises:
      InputError: it is none.

    Example:
      >>> positive("stages", 2)
      2
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}, wanted an integer: pass a whole number of at least 1") from None
    if number < 1:
        raise InputError(f"{name} is {number}, wanted at least 1: pass a positive number")
    return number
