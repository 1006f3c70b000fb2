"""Overrides of configuration fields from the command line: `--section.field value`.

tyro reads the values. What it says about a wrong one is a box of ten lines, so flags are looked up and messages written
here. Nothing here knows the configuration: any frozen dataclass whose fields are frozen dataclasses will do.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tyro

from mp_lstm.errors import InputError
from mp_lstm.training.fields import field_types, in_words, to_toml

C = TypeVar("C")

_DOTTED = re.compile(r"--[\w-]+\.[\w.-]*")  # a text that begins with dashes is none

_SWITCHES = {"true": "True", "false": "False"}

# Booleans take a value: as a bare switch, "--model.tie False" would set it and leave a stray word behind.
_SETTINGS = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)


def override(config: C, words: Sequence[str]) -> C:
    """Applies overrides, the last one of a field winning.

    Args:
      config: it is left as it is.
      words: such as ["--model.tie", "False", "--data.buckets", "8", "16"]; lists and tables as in TOML, too.

    Returns:
      The new configuration.

    Raises:
      InputError: a flag is unknown, or its value has the wrong type.

    Example:
      >>> from mp_lstm.training.config import Config
      >>> override(Config(), ["--train.epochs=3", "--model.residual", "none"]).model.residual is None
      True
      >>> override(Config(), ["--pipeline.partition", "[4, 2]"]).pipeline.partition
      (4, 2)
    """
    flags = flag_types(type(config))
    for flag, values in _grouped(words):
        if flag not in flags:
            raise InputError(f"{flag} is unknown: {suggest_flag(flag, flags)}")
        hint = flags[flag]
        if not values and typing.get_origin(hint) is not dict:  # a table may be empty
            raise InputError(f"{flag} is missing, wanted {in_words(hint)}")
        values = _plain_words(values)
        if types.NoneType in typing.get_args(hint):
            values = ["None" if value == "none" else value for value in values]
        values = _with_switches(hint, values)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                config = _read(config, [flag, *values])
        except SystemExit:
            raise InputError(f"{flag} is {' '.join(values)!r}, wanted {in_words(hint)}") from None
    return config


def overridden(words: Sequence[str]) -> list[str]:
    """The full names of the fields that overrides set.

    Example:
      >>> overridden(["--model.tie", "False", "--data.batch-size=8"])
      ['model.tie', 'data.batch_size']
    """
    return list(dict.fromkeys(flag[2:] for flag, _ in _grouped(words)))


def overrides_help(config: Any, *, width: int = 100) -> str:
    """The flags with the comments of their fields, types and values, for `--help`.

    Example:
      >>> from mp_lstm.training.config import Config
      >>> overrides_help(Config()).splitlines()[9]
      '  --data.batch_size      Rows of a batch. (a whole number; default: 32)'
    """
    blocks = []
    for section, cls in field_types(type(config)).items():
        comments, values = field_comments(cls), vars(getattr(config, section))
        margin = max(map(len, values)) + len(section) + 7
        lines = [cls.__doc__.strip()]
        for name, hint in field_types(cls).items():
            shown = to_toml(values[name]).replace('"', "")
            text = f"{comments[name]} ({in_words(hint)}; default: {shown})"
            flag = f"  --{section}.{name}".ljust(margin)
            lines += textwrap.wrap(text, width, initial_indent=flag, subsequent_indent=" " * margin)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def field_comments(cls: type[Any]) -> dict[str, str]:
    """The comment above each field of a dataclass, from its source.

    Example:
      >>> from mp_lstm.training.config import TrainConfig
      >>> field_comments(TrainConfig)["epochs"]
      'Passes over the training text.'
    """
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in map(str.strip, inspect.getsource(cls).splitlines()):
        if line.startswith("#"):
            above.append(line.lstrip("# "))
            continue
        if (name := line.partition(":")[0]) in field_types(cls):
            comments[name] = " ".join(above)
        above = []
    return comments


def flag_types(cls: type[Any]) -> dict[str, Any]:
    """The flag of every field, and the type of its value.

    Example:
      >>> from mp_lstm.training.config import Config
      >>> flag_types(Config)["--train.epochs"]
      <class 'int'>
    """
    sections = field_types(cls).items()
    return {f"--{section}.{name}": hint for section, part in sections for name, hint in field_types(part).items()}


def split_overrides(words: Sequence[str], flags: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Takes the overrides out of the words of a command.

    A flag with a dot is an override. It has one value; where it takes a list, all words up to the next flag.

    Args:
      words: of the command line.
      flags: types of the values, see `flag_types`.

    Returns:
      The other words, and the overrides.

    Example:
      >>> flags = {"--model.layers": int, "--data.buckets": tuple[int, ...]}
      >>> split_overrides(["--model.layers", "2", "a.toml", "--data.buckets", "8", "16", "--resume"], flags)
      (['a.toml', '--resume'], ['--model.layers', '2', '--data.buckets', '8', '16'])
    """
    others: list[str] = []
    overrides: list[str] = []
    room = 0.0
    for word in words:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            is_override = _DOTTED.fullmatch(flag) is not None
            room = _most_values(flags.get(_normal(flag))) if is_override and not equals else 0
            (overrides if is_override else others).append(word)
        elif room > 0:
            overrides.append(word)
            room -= 1
        else:
            others.append(word)
    return others, overrides


def suggest_flag(flag: str, known: Iterable[str]) -> str:
    """Says which known flag was meant: the one of the same field, else the most similar one.

    Example:
      >>> suggest_flag("--layers", ["--model.layers", "--model.tie"])
      'did you mean --model.layers?'
    """
    names = list(known)
    field = flag.split(".")[-1].lstrip("-")
    close = [name for name in names if name.split(".")[-1] == field] or difflib.get_close_matches(flag, names)
    return f"did you mean {close[0]}?" if close else "--help lists all flags"


def _read(config: C, words: Sequence[str]) -> C:
    return tyro.cli(type(config), default=config, args=words, config=_SETTINGS, use_underscores=True)


def _plain_words(values: list[str]) -> list[str]:
    """A list or a table in brackets as its words; anything else as it is.

    Example:
      >>> _plain_words(["[8,", "16]"]), _plain_words(["{ b2 = 0.99 }"]), _plain_words(["(4, 2)"])
      (['8', '16'], ['b2', '0.99'], ['4', '2'])
    """
    text = " ".join(values).strip()
    if text[:1] == "(" and text[-1:] == ")":
        text = f"[{text[1:-1]}]"
    if text[:1] not in ("[", "{"):
        return values
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return values
    items = value if isinstance(value, list) else [part for item in value.items() for part in item]
    return [str(item) for item in items]


def _with_switches(hint: Any, values: list[str]) -> list[str]:
    """The words with true and false, as a file and the help have them, as tyro wants them; names of options stay.

    Example:
      >>> _with_switches(bool, ["true"]), _with_switches(dict[str, bool | str], ["true", "false"])
      (['True'], ['true', 'False'])
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return [_SWITCHES.get(value, value) for value in values]
    if origin is dict and bool in typing.get_args(parts[1]):
        return [_SWITCHES.get(value, value) if i % 2 else value for i, value in enumerate(values)]
    return values


def _most_values(hint: Any) -> float:
    kinds = {typing.get_origin(part) for part in (hint, *typing.get_args(hint))}
    return 1 if kinds.isdisjoint((tuple, dict)) else math.inf


def _normal(flag: str) -> str:
    """A flag as fields are named: "--train.max-steps" is "--train.max_steps"."""
    return f"--{flag[2:].replace('-', '_')}"


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words up to the next one; "--a=b" is a flag and a word."""
    flag, values = None, []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag is not None:
            yield flag, values
        elif values:
            raise InputError(f"{values[0]!r} follows no flag: write --section.field before its value")
        name, equals, value = word.partition("=")
        flag, values = _normal(name), [value] if equals else []
