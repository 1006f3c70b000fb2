"""Checks of numbers that are given."""

from __future__ import annotations

import operator
from typing import Any, SupportsFloat, SupportsIndex

from mp_lstm.errors import InputError

LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of positive numbers. Devices compute in float32: a smaller one is zero there, a larger one infinite."""

REPR_LIMIT = 40
"""Characters of a value that messages quote; of what is longer they tell the type."""


def positive(name: str, value: SupportsIndex) -> int:
    """A whole number of at least 1.

    Args:
      name: of the argument, for the message.
      value: as it was given; numpy's whole numbers are some, True and False are none.

    Raises:
      InputError: it is none.

    Example:
      >>> positive("stages", 2)
      2
    """
    found = whole(value)
    if found is None:
        raise InputError(f"{name} is {shown(value)}, wanted an integer: pass a whole number of at least 1")
    if found < 1:
        raise InputError(f"{name} is {found}, wanted at least 1: pass a positive number")
    return found


def whole(value: Any) -> int | None:
    """The whole number that a value is, None where it is none.

    Example:
      >>> whole(3), whole(3.0), whole(True)
      (3, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def within(name: str, value: SupportsFloat, wanted: str, *, least: float = -MOST, most: float = MOST) -> float:
    """A number in a range, by default of all that float32 holds.

    Args:
      name: of the argument, for the message.
      value: as it was given.
      wanted: what it must be, for the message.
      least, most: the range.

    Raises:
      InputError: it is no number, or out of the range.

    Example:
      >>> within("max_norm", 5, "a positive number", least=LEAST)
      5.0
    """
    found = number(value)
    if found is None or not least <= found <= most:
        raise InputError(
            f"{name} is {shown(value)}, {wanted} is wanted: pass one that float32 holds, {least:.2g} to {most:.2g}"
        )
    return found


def number(value: Any) -> float | None:
    """The number that a value is, None where it is none: a word, several numbers, True or False.

    Example:
      >>> number(3), number("3"), number(True)
      (3.0, None, None)
    """
    if isinstance(value, bool | str | bytes) or getattr(value, "shape", ()):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def shown(value: Any) -> str:
    """A value as messages have it: a number as it is, a layer by its name, anything long by its type.

    Example:
      >>> shown(2.5), shown("2"), shown(print)
      ('2.5', "'2'", 'a builtin_function_or_method')
    """
    kind, name = type(value).__name__, getattr(value, "name", None)
    if isinstance(name, str):
        return f"the {kind} {name!r}"
    text = repr(value)
    return f"a {kind}" if callable(value) or len(text) > REPR_LIMIT or "\n" in text else text
