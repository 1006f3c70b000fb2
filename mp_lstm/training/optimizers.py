"""Optimizers and learning rates by their names in optax.

Optax's functions are found by their signatures, so a release that adds one needs nothing here. Whether an optimizer can
be pipelined (it may not mix leaves) is found out by `make_pipeline`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mp_lstm.errors import InputError
from mp_lstm.runtime import average_parameters
from mp_lstm.training.config import MOST, Config
from mp_lstm.training.fields import suggestion

MOST_UPDATES = 2**31 - 1  # optax counts them in int32
PLAIN_RATES = ("constant", "plateau")  # the optimizer's rate stays; plateau halving acts on the state's rate factor

Schedule = Callable[[Any], Any]


def make_optimizer(config: Config, schedule: Schedule | float | None = None) -> optax.GradientTransformation:
    """Makes the optimizer by its name in optax.

    Args:
      config: its [optimizer] section says which.
      schedule: learning rate, or a function from the update's number to it; None: the configured first one.

    Raises:
      InputError: the name or an option is unknown, or the optimizer takes no schedule.

    Example:
      >>> from mp_lstm.training.config import load
      >>> words = ["--optimizer.name", "sgd", "--optimizer.options", "momentum", "0.9"]
      >>> optimizer = make_optimizer(load(overrides=words), 0.1)
      >>> round(float(optimizer.update(2.0, optimizer.init(1.0))[0]), 6)
      -0.2
    """
    section = config.optimizer
    known = optimizers()
    if section.name not in known:
        raise InputError(f"optimizer.name {section.name!r} is unknown to optax: {suggestion(section.name, known)}")
    maker = known[section.name]
    _check_options("optimizer.options", section.options, maker, taken=("learning_rate",))
    rate = section.learning_rate if schedule is None else schedule
    if callable(rate) and not _takes_schedule(maker):
        raise InputError(
            f"optimizer.rate_schedule is {section.rate_schedule}, but {section.name} takes one rate alone: pass "
            "constant or plateau"
        )
    with _fits("optimizer.options", section.options, section.name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what optax thinks of an optimizer that make_pipeline may refuse anyway
        optimizer = maker(learning_rate=rate, **section.options)
        if section.options:
            leaf = jax.ShapeDtypeStruct((2, 2), jnp.float32)
            state = jax.eval_shape(optimizer.init, leaf)
            jax.eval_shape(optimizer.update, leaf, state, leaf)
    if section.weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(section.weight_decay), optimizer)
    return optax.chain(optimizer, average_parameters()) if section.average else optimizer


def make_schedule(config: Config, updates: int) -> Schedule | float:
    """Makes the learning rate over the run: a number, or a function of the update's number.

    Args:
      config: `[optimizer]` says which, `train.epochs` how long a run is. `train.max_steps` does not matter, so that
        a run that was cut short can be continued.
      updates: in an epoch.

    Raises:
      InputError: the name or an option is unknown, or an option is missing.

    Example:
      >>> from mp_lstm.training.config import load
      >>> words = "--optimizer.rate_schedule epochs --optimizer.learning_rate 1 --optimizer.rate_epochs 2".split()
      >>> rate = make_schedule(load(overrides=words), updates=10)
      >>> [float(rate(update)) for update in (0, 19, 20, 29, 30)]
      [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    section = config.optimizer
    peak = section.learning_rate
    total = updates * config.train.epochs
    if total > MOST_UPDATES:
        raise InputError(
            f"train.epochs is {config.train.epochs}, which makes {total:,} updates, wanted at most {MOST_UPDATES:,}, "
            f"the largest count: pass at most {MOST_UPDATES // updates:,}"
        )
    if section.rate_schedule == "epochs" or section.rate_schedule in PLAIN_RATES:
        if section.rate_options:
            raise InputError(
                f"optimizer.rate_options are for an optax schedule, rate_schedule is {section.rate_schedule}: leave "
                "them out"
            )
        if section.rate_schedule in PLAIN_RATES:
            return peak
        return optax.exponential_decay(
            peak,
            updates,
            1 / section.rate_divisor,
            transition_begin=min((section.rate_epochs - 1) * updates, MOST_UPDATES),
            staircase=True,
        )
    known = schedules()
    if section.rate_schedule not in known:
        raise InputError(
            f"optimizer.rate_schedule {section.rate_schedule!r} is unknown: {_meant(section.rate_schedule)}"
        )
    maker = known[section.rate_schedule]
    parameters = inspect.signature(maker).parameters
    first = "peak_value" if "peak_value" in parameters else "init_value"
    _check_options("optimizer.rate_options", section.rate_options, maker, taken=(first,))
    whole = dict.fromkeys(("decay_steps", "transition_steps"), total)
    given = {"init_value": 0.0, first: peak, **whole} | section.rate_options
    given = {name: value for name, value in given.items() if name in parameters}
    if missing := [name for name, p in parameters.items() if p.default is p.empty and name not in given]:
        raise InputError(
            f"optimizer.rate_options lacks {missing[0]} of {section.rate_schedule}: write e.g. "
            f"rate_options = {{ {missing[0]} = {max(1, total // 10) if _is_whole(parameters[missing[0]]) else 0.1} }}"
        )
    with _fits("optimizer.rate_options", section.rate_options, f"{section.rate_schedule}, in a run of {total} updates"):
        schedule = maker(**given)
        sampled, rates = _sampled(schedule, total)
    # Interpolation in float32 may end a little below zero.
    wrong = np.flatnonzero(~np.isfinite(rates) | (rates < -1e-6 * peak))
    if len(wrong):
        raise InputError(
            f"optimizer.rate_options is {_shown(section.rate_options)}, which makes the rate of "
            f"{section.rate_schedule} {rates[wrong[0]]:.3g} at update {sampled[wrong[0]]} of {total}, wanted a finite "
            "one of at least 0: pass others, or leave them out"
        )
    return schedule


@functools.cache
def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Optax's optimizers that need no more than a learning rate, by name."""
    return _functions(optax, lambda name, given: "learning_rate" in given and not name.startswith("scale_by_"))


@functools.cache
def schedules() -> dict[str, Callable[..., Schedule]]:
    """Optax's schedules that numbers describe, by name."""

    def wanted(name: str, given: Mapping[str, Any]) -> bool:
        return not given.keys().isdisjoint(("init_value", "peak_value")) and "boundaries_and_scales" not in given

    return _functions(optax.schedules, wanted)


def _takes_schedule(maker: Callable[..., Any]) -> bool:
    accepted = typing.get_args(inspect.signature(maker).parameters["learning_rate"].annotation)
    return any(typing.get_origin(kind) is Callable for kind in accepted)


def _functions(module: types.ModuleType, wanted: Callable[[str, Mapping[str, Any]], Any]) -> dict[str, Any]:
    functions = inspect.getmembers(module, inspect.isfunction)
    public = {name: function for name, function in functions if not name.startswith("_")}
    return {name: f for name, f in public.items() if wanted(name, inspect.signature(f).parameters)}


@contextlib.contextmanager
def _fits(field: str, options: Mapping[str, Any], name: str) -> Iterator[None]:
    """What optax says of options that passed `_check_options` and are wrong even so."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise InputError(
            f"{field} is {_shown(options)}, which optax does not take for {name} ({error}): pass others, or leave "
            "them out"
        ) from error


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{option} = {value!r}" for option, value in options.items()) or "empty"


def _sampled(schedule: Schedule, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Updates of a run, the first two and the last among them, and their rates."""
    updates = np.unique([min(1, total - 1), *np.linspace(0, total - 1, 257)]).astype(np.int32)
    return updates, np.asarray(jax.vmap(schedule)(updates), float)


def _meant(name: str) -> str:
    """Which schedule was meant: optax's endings do not count, so that constant_schedule is "constant"."""
    names = ("epochs", *PLAIN_RATES, *schedules())
    stems = {known.removesuffix("_schedule"): known for known in names}
    close = difflib.get_close_matches(name.removesuffix("_schedule"), stems, n=1)
    return f"did you mean {stems[close[0]]}?" if close else suggestion(name, names)


def _is_whole(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (int, "int")


def _check_options(field: str, options: Mapping[str, Any], maker: Callable[..., Any], taken: Sequence[str]) -> None:
    """Options must be arguments of the maker, and finite numbers or booleans where its defaults are."""
    parameters = {name: p for name, p in inspect.signature(maker).parameters.items() if name not in taken}
    for name, value in options.items():
        if name in taken:
            raise InputError(f"{field} has {name}: set optimizer.learning_rate instead")
        if name not in parameters:
            raise InputError(f"{field} has {name!r}, {maker.__name__} does not: {suggestion(name, parameters)}")
        default = parameters[name].default
        is_switch = isinstance(default, bool)
        if is_switch != isinstance(value, bool) or (isinstance(default, int | float) and isinstance(value, str)):
            wanted = "true or false" if is_switch else "a number"
            raise InputError(f"{field}: {name} is {value!r}, wanted {wanted}")
        if isinstance(value, int | float) and not abs(value) <= MOST:
            wanted = "a finite number that float32 holds"
            raise InputError(f"{field}: {name} is {value!r}, wanted {wanted}: pass another, or leave it out")
        if _is_whole(parameters[name]) and isinstance(value, float) and not value.is_integer():
            raise InputError(f"{field}: {name} is {value!r}, wanted a whole number")
