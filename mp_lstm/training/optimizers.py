"""Optimizers and learning rates by their names in optax.

Optax's functions are found by their signatures, so a release that adds one needs nothing here. Whether an optimizer can
be pipelined (its updates may need no more than a stage has, and may not mix leaves) is found out by trying.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import re
import types
import typing
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mp_lstm.errors import InputError
from mp_lstm.planning.checks import MOST
from mp_lstm.runtime import average_parameters
from mp_lstm.runtime.optimizer import check_leafwise
from mp_lstm.training.config import Config
from mp_lstm.training.fields import suggestion

MOST_UPDATES = 2**31 - 1  # optax counts them in int32
PLAIN_RATES = ("constant", "plateau")  # the optimizer's rate stays; plateau halving acts on the state's rate factor
OWN_RATES = (*PLAIN_RATES, "epochs")  # those that are no schedules of optax
EXAMPLES = {"end_value": 0.0, "power": 1.0}  # of options, where 0.1 would be none
UNFIT = ("lbfgs", "noisy_sgd")  # optimizers that trying finds unfit: trying all, to list those that work, takes long

Schedule = Callable[[Any], Any]


def make_optimizer(config: Config, schedule: Schedule | float | None = None) -> optax.GradientTransformation:
    """Makes the optimizer by its name in optax.

    Args:
      config: its [optimizer] section says which.
      schedule: learning rate, or a function from the update's number to it; None: the configured first one.

    Raises:
      InputError: the name or an option is unknown, an option is missing, the optimizer takes no schedule, or it cannot
        update a stage without the others.

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
        raise InputError(_unknown_optimizer(section.name))
    maker = known[section.name]
    _check_options("optimizer.options", section.options, maker, section.name, taken=("learning_rate",))
    _check_complete("optimizer.options", {"learning_rate", *section.options}, maker, section.name)
    rate = section.learning_rate if schedule is None else schedule
    if callable(rate) and not _takes_schedule(maker):
        raise InputError(
            f"optimizer.rate_schedule is {section.rate_schedule}, but {section.name} takes one rate alone: pass "
            "constant or plateau"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what optax tells programmers
        optimizer = _tried(maker, rate, section.name, section.options)
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
    if section.rate_schedule in PLAIN_RATES:
        return peak
    if section.rate_schedule == "epochs":
        return optax.exponential_decay(
            peak,
            updates,
            1 / section.rate_divisor,
            transition_begin=min((section.rate_epochs - 1) * updates, MOST_UPDATES),
            staircase=True,
        )
    known = schedules()
    if section.rate_schedule not in known:
        raise InputError(_unknown_schedule(section.rate_schedule))
    maker = known[section.rate_schedule]
    parameters = inspect.signature(maker).parameters
    first = "peak_value" if "peak_value" in parameters else "init_value"
    _check_options("optimizer.rate_options", section.rate_options, maker, section.rate_schedule, taken=(first,))
    whole = dict.fromkeys(("decay_steps", "transition_steps"), total)
    given = {"init_value": 0.0, first: peak, **whole} | section.rate_options
    given = {name: value for name, value in given.items() if name in parameters}
    _check_complete("optimizer.rate_options", given, maker, section.rate_schedule, steps=max(1, total // 10))
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
    """Optax's optimizers with a learning rate, by name; those of `UNFIT` are refused when they are made."""
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
    public = {name: function for name, function in vars(module).items() if not name.startswith("_")}
    functions = {name: f for name, f in sorted(public.items()) if isinstance(f, types.FunctionType | functools.partial)}
    return {name: f for name, f in functions.items() if wanted(name, inspect.signature(f).parameters)}


def _tried(
    maker: Callable[..., Any], rate: Schedule | float, name: str, options: Mapping[str, Any]
) -> optax.GradientTransformation:
    """The optimizer, once it has been seen to update a stage by its gradient and parameters alone."""
    try:
        optimizer = maker(learning_rate=rate, **options)
        leaf = jax.ShapeDtypeStruct((2, 2), jnp.float32)
        jax.eval_shape(optimizer.update, leaf, jax.eval_shape(optimizer.init, leaf), leaf)
        check_leafwise(optimizer)
        return optimizer
    except InputError as error:
        cause = error.__cause__
    except _WRONG as error:
        cause = error
    if cause is None:
        why = "depends on all other parameters"
    elif needs := re.findall(r"'(\w+)'", str(cause).partition("required keyword-only argument")[2]):
        why = f"needs {', '.join(needs)} too"
    elif options:
        raise _not_taken("optimizer.options", options, name, cause)
    else:
        why = f"fails ({cause})"
    raise InputError(
        f"optimizer.name is {name!r}, whose update {why}; a stage has but its own gradient and parameters: pass "
        "another, e.g. adam, adamw or sgd"
    )


def _unknown_optimizer(name: str) -> str:
    """What is said of a name that is none of `optimizers`."""
    known = [one for one in optimizers() if one not in UNFIT]
    if not callable(getattr(optax, name, None)):
        return f"optimizer.name {name!r} is unknown to optax: {suggestion(name.lower(), known)}"
    core = name.removeprefix("scale_by_")
    remedy = f"did you mean {core}?" if core in known else f"one of {', '.join(known)} is wanted"
    return f"optimizer.name {name!r} is no optimizer of optax that takes a learning_rate: {remedy}"


def _unknown_schedule(name: str) -> str:
    """What is said of a name that is none of `schedules`."""
    names = (*OWN_RATES, *schedules())
    wanted = f"one of {', '.join(names)} is wanted"
    # Optax's endings do not count, so that constant_schedule is "constant".
    stems = {known.removesuffix("_schedule"): known for known in names}
    stem = name.lower().removesuffix("_schedule")
    if stem not in stems and inspect.isfunction(getattr(optax.schedules, name, None)):
        return f"optimizer.rate_schedule {name!r} needs more than the numbers that rate_options may hold: {wanted}"
    close = difflib.get_close_matches(stem, stems, n=1)
    meant = f"did you mean {stems[close[0]]}? " if close else ""
    return (
        f"optimizer.rate_schedule {name!r} is unknown: {meant}{wanted[0].upper() if close else wanted[0]}{wanted[1:]}"
    )


@contextlib.contextmanager
def _fits(field: str, options: Mapping[str, Any], name: str) -> Iterator[None]:
    """What optax says of options that passed `_check_options` and are wrong even so."""
    try:
        yield
    except _WRONG as error:
        raise _not_taken(field, options, name, error) from error


_WRONG = (TypeError, ValueError, ArithmeticError, AttributeError)  # what optax raises where an argument is wrong


def _not_taken(field: str, options: Mapping[str, Any], name: str, error: BaseException) -> InputError:
    return InputError(
        f"{field} is {_shown(options)}, which optax does not take for {name} ({error}): pass others, or leave them out"
    )


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{option} = {value!r}" for option, value in options.items()) or "empty"


def _sampled(schedule: Schedule, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Updates of a run, the first two and the last among them, and their rates."""
    updates = np.unique([min(1, total - 1), *np.linspace(0, total - 1, 257)]).astype(np.int32)
    return updates, np.asarray(jax.vmap(schedule)(updates), float)


def _is_whole(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (int, "int")


def _takes_anything(parameter: inspect.Parameter) -> bool:
    """Whether it may be anything, such as the name of a type."""
    kinds = (parameter.annotation, *typing.get_args(parameter.annotation))
    return not isinstance(parameter.default, int | float) and not {int, float, "int", "float"}.intersection(kinds)


def _check_options(
    field: str, options: Mapping[str, Any], maker: Callable[..., Any], name: str, taken: Sequence[str]
) -> None:
    """Options must be arguments of the maker, and finite numbers or booleans where these are wanted."""
    parameters = {option: p for option, p in inspect.signature(maker).parameters.items() if option not in taken}
    for option, value in options.items():
        if option in taken:
            raise InputError(f"{field} has {option}: set optimizer.learning_rate instead")
        if option not in parameters:
            raise InputError(f"{field} has {option!r}, {name} does not: {suggestion(option, parameters)}")
        parameter = parameters[option]
        is_switch = isinstance(parameter.default, bool)
        unlike = isinstance(value, str) or is_switch != isinstance(value, bool)
        if unlike and not _takes_anything(parameter):
            wanted = "true or false" if is_switch else "a number"
            raise InputError(f"{field}: {option} is {value!r}, wanted {wanted}")
        if isinstance(value, int | float) and not abs(value) <= MOST:
            wanted = "a finite number that float32 holds"
            raise InputError(f"{field}: {option} is {value!r}, wanted {wanted}: pass another, or leave it out")
        if _is_whole(parameter) and isinstance(value, float) and not value.is_integer():
            raise InputError(f"{field}: {option} is {value!r}, wanted a whole number")


def _check_complete(field: str, given: Container[str], maker: Callable[..., Any], name: str, *, steps: int = 1) -> None:
    """Nothing that the maker needs may be missing; `steps` is an example of a whole number."""
    parameters = inspect.signature(maker).parameters
    missing = [option for option, p in parameters.items() if p.default is p.empty and option not in given]
    if missing:
        values = (steps if _is_whole(parameters[option]) else EXAMPLES.get(option, 0.1) for option in missing)
        examples = (f"{option} = {value}" for option, value in zip(missing, values, strict=True))
        raise InputError(
            f"{field} lacks {' and '.join(missing)} of {name}: write e.g. {field.partition('.')[2]} = "
            f"{{ {', '.join(examples)} }}"
        )
