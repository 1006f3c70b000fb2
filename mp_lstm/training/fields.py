"""Types of configuration fields: read from TOML, written as TOML, and told in words.

A field is an int, float, bool, str, Literal of texts, tuple of numbers, dict of plain values, or a union of these and
None. TOML has no null, so None is the text "none" there.
"""

from __future__ import annotations

import difflib
import functools
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

WRONG = object()
_UNIONS = (typing.Union, types.UnionType)


@functools.cache
def field_types(cls: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass and their types.

    Example:
      >>> from mp_lstm.training.config import TrainConfig
      >>> field_types(TrainConfig)["epochs"]
      <class 'int'>
    """
    return typing.get_type_hints(cls)


def from_toml(hint: Any, value: Any) -> Any:
    """A TOML value as a field of this type holds it, `WRONG` where it cannot.

    Example:
      >>> from_toml(int | tuple[int, ...], [64, 32]), from_toml(float, 1), from_toml(int, True) is WRONG
      ((64, 32), 1.0, True)
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        found = (from_toml(part, value) for part in parts)
        return next((one for one in found if one is not WRONG), WRONG)
    if origin is Literal:
        return value if value in parts and isinstance(value, str) else WRONG
    if origin is tuple:
        items = [from_toml(parts[0], item) for item in value] if isinstance(value, list) else [WRONG]
        return WRONG if any(item is WRONG for item in items) else tuple(items)
    if origin is dict:
        fits = isinstance(value, dict) and not any(from_toml(parts[1], item) is WRONG for item in value.values())
        return dict(value) if fits else WRONG
    if hint is types.NoneType:
        return None if value in ("none", "None") else WRONG
    if hint is float and type(value) is int:
        return float(value) if abs(value) < 10**300 else WRONG  # more is no float
    return value if type(value) is hint else WRONG


def to_toml(value: Any) -> str:
    """A value as TOML writes it.

    Example:
      >>> to_toml((8, 16)), to_toml({"b2": 0.99}), to_toml(None)
      ('[8, 16]', '{ "b2" = 0.99 }', '"none"')
    """
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, dict):
        items = ", ".join(f"{to_toml(key)} = {to_toml(item)}" for key, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, str):  # JSON escapes what TOML does, except for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return repr(value)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    types.NoneType: "none",
    dict: "names with their values",
}


def in_words(hint: Any) -> str:
    """A type in words, for messages.

    Example:
      >>> in_words(Literal["auto"] | tuple[int, ...])
      'auto or a list of whole numbers'
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return " or ".join(in_words(part) for part in parts)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple:
        return "a list of whole numbers" if parts[0] is int else "a list of numbers"
    return _WORDS[origin or hint]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Says which known name was meant, or lists them all.

    Example:
      >>> suggestion("adma", ["adam", "sgd"]), suggestion("x", ["adam", "sgd"])
      ('did you mean adam?', 'one of adam, sgd is wanted')
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(names)} is wanted"
