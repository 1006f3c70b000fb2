"""Checks of plain numbers that users give, each with the message of its failure."""

from __future__ import annotations

from typing import Any

from mp_lstm.errors import InputError
from mp_lstm.planning.checks import whole


def integer(name: str, value: Any, least: int = 1) -> int:
    """Checks an integer that a user gave.

    Args:
      name: what the number is, for the message.
      value: an int, a numpy integer or anything else with `__index__`.
      least: the smallest value allowed.

    Returns:
      The value as an int.

    Raises:
      InputError: it is no integer, or smaller than `least`.

    Example:
      >>> integer("batch_size", 20)
      20
    """
    number = whole(value)
    if number is None or number < least:
        raise InputError(f"{name} is {value!r}, wanted an integer of at least {least}: pass e.g. {max(least, 8)}")
    return number
