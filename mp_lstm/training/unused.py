"""Fields that do nothing with the value of another one, as a factor for plateaus with a rate that knows none.

Who sets such a field expects it to do something. Which ones there are is data, `ONLY_WITH`; who set them, a file or the
command line, is `load`'s to say. A field that has its default is never one: it may have been written by `save`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from mp_lstm.errors import InputError
from mp_lstm.training.fields import to_toml


class OnlyWith(NamedTuple):
    """The field that another one depends on, the values with which that one does something, and the words for them."""

    field: str
    allowed: Callable[[Any], bool]
    wanted: str


def _one_of(field: str, *values: Any) -> OnlyWith:
    return OnlyWith(field, lambda value: value in values, " or ".join(map(to_toml, values)))


def _none_of(field: str, *values: Any, wanted: str) -> OnlyWith:
    return OnlyWith(field, lambda value: value not in values, wanted)


# A field that does nothing without another: which, and with what values it does something. The message ends with these:
# "..., or set optimizer.average to true".
ONLY_WITH = {
    "data.buckets": _one_of("data.mode", "sentences"),
    "data.long_sentences": _one_of("data.mode", "sentences"),
    "data.length": _one_of("data.mode", "contiguous"),
    "data.random_length": _one_of("data.mode", "contiguous"),
    "optimizer.rate_options": _none_of(
        "optimizer.rate_schedule", "constant", "plateau", "epochs", wanted="a schedule of optax"
    ),
    "optimizer.rate_factor": _one_of("optimizer.rate_schedule", "plateau"),
    "optimizer.plateau_threshold": _one_of("optimizer.rate_schedule", "plateau"),
    "optimizer.rate_epochs": _one_of("optimizer.rate_schedule", "epochs"),
    "optimizer.rate_divisor": _one_of("optimizer.rate_schedule", "epochs"),
    "optimizer.average_after": _one_of("optimizer.average", True),
}


def unused(config: Any, names: Iterable[str]) -> list[str]:
    """Those fields that have another value than their default, and do nothing.

    Args:
      config: a configuration.
      names: full names of fields.

    Example:
      >>> from mp_lstm.training.config import Config, OptimizerConfig
      >>> config = Config(optimizer=OptimizerConfig(rate_factor=0.3, rate_epochs=2, rate_schedule="epochs"))
      >>> unused(config, ["optimizer.rate_factor", "optimizer.rate_epochs", "optimizer.rate_divisor", "model.layers"])
      ['optimizer.rate_factor']
    """
    default = type(config)()

    def is_unused(name: str) -> bool:
        if name not in ONLY_WITH or attrgetter(name)(config) == attrgetter(name)(default):
            return False
        other = ONLY_WITH[name]
        return not other.allowed(attrgetter(other.field)(config))

    return [name for name in names if is_unused(name)]


def refuse_unused(config: Any, names: Iterable[str], source: str = "") -> None:
    """Raises InputError for the first of these fields that `unused` tells.

    Args:
      config: a configuration.
      names: full names of the fields that somebody set.
      source: put before the message: where they were set.

    Example:
      >>> from mp_lstm.training.config import Config
      >>> refuse_unused(Config(), ["optimizer.rate_factor"])
    """
    for name in unused(config, names):
        other = ONLY_WITH[name]
        value, with_value = (to_toml(attrgetter(one)(config)) for one in (name, other.field))
        raise InputError(
            f"{source}{name} is {value}, which does nothing while {other.field} is {with_value}: leave it out, or set "
            f"{other.field} to {other.wanted}"
        )
