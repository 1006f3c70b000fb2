"""Names and options that cannot be: one line that names the field. What is made by name is tested with `build`."""

from __future__ import annotations

import inspect
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import optax
import pytest

from mp_lstm.errors import InputError
from mp_lstm.training import optimizers
from mp_lstm.training.config import Config, OptimizerConfig, load
from mp_lstm.training.optimizers import OWN_RATES, UNFIT, make_optimizer, make_schedule
from mp_lstm.training.overrides import field_comments

PUBLIC = sorted(name for name in vars(optax) if not name.startswith("_"))
SCHEDULES = sorted(name for name, f in inspect.getmembers(optax.schedules, inspect.isfunction))
OF_A_SCHEDULE = {"end_value": "0", "power": "2", "decay_rate": "0.5", "warmup_steps": "3"}  # where there is no default


def config_of(words: str) -> Config:
    return load(overrides=words.split())


def refusal_of_name(name: str, options: str = "") -> str | None:
    """What is said of an optimizer, if anything."""
    config = config_of(f"--optimizer.options {options}") if options else Config()
    try:
        make_optimizer(replace(config, optimizer=replace(config.optimizer, name=name)))
    except InputError as error:
        return str(error)
    return None


def refusal_of_schedule(name: str) -> str | None:
    """What is said of a schedule with the options that it needs, if anything."""
    maker = getattr(optax.schedules, name, None)
    needed = inspect.signature(maker).parameters if inspect.isfunction(maker) else {}
    options = " ".join(f"{option} {value}" for option, value in OF_A_SCHEDULE.items() if option in needed)
    words = f"--optimizer.rate_schedule {name} --optimizer.rate_options {options}"
    try:
        make_schedule(config_of(words), 10)
    except InputError as error:
        return str(error)
    return None


# --- names ---


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("lbfgs", "", "needs value, grad, value_fn too"),
        ("lbfgs", "memory_size 5", "needs value, grad, value_fn too"),
        ("noisy_sgd", "", "depends on all other parameters"),
        ("noisy_sgd", "eta 0.1", "depends on all other parameters"),
    ],
)
def test_an_optimizer_that_a_stage_cannot_use_is_named(name: str, options: str, why: str) -> None:
    """They were refused in Python's words, "update_fn() missing 3 required keyword-only arguments", or as a chain."""
    assert refusal_of_name(name, options) == (
        f"optimizer.name is '{name}', whose update {why}; a stage has but its own gradient and parameters: "
        "pass another, e.g. adam, adamw or sgd"
    )


def test_every_name_of_optax_works_or_is_refused_in_one_line() -> None:
    """Those that are listed as working are exactly those that work."""
    refused = {name: refusal_of_name(name) for name in PUBLIC}
    work = sorted(name for name, message in refused.items() if message is None)
    assert refusal_of_name("xyzzy") == f"optimizer.name 'xyzzy' is unknown to optax: one of {', '.join(work)} is wanted"
    assert {"adam", "nadam", "nadamw", "sgd", "adafactor", "lamb"} <= set(work)
    assert sorted(set(optimizers.optimizers()) - set(work)) == sorted(UNFIT)
    said = [message for message in refused.values() if message is not None]
    assert [message for message in said if not message.startswith("optimizer.name ") or "\n" in message] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SGD", "optimizer.name 'SGD' is unknown to optax: did you mean sgd?"),
        (
            "polyak_sgd",
            "optimizer.name 'polyak_sgd' is no optimizer of optax that takes a learning_rate: one of adabel",
        ),
        (
            "scale_by_adam",
            "optimizer.name 'scale_by_adam' is no optimizer of optax that takes a learning_rate: did you ",
        ),
    ],
)
def test_a_name_that_is_no_optimizer(name: str, message: str) -> None:
    """Of polyak_sgd it was said that optax does not know it, and that noisy_sgd, which does not work, was meant."""
    assert str(refusal_of_name(name)).startswith(message)


def test_nesterov_adam_has_its_own_name() -> None:
    """It is no function in optax but a partial one, so it was unknown."""
    params = {"w": np.ones(3, np.float32)}
    ours, theirs = make_optimizer(config_of("--optimizer.name nadam"), 0.1), optax.nadam(0.1)
    got, wanted = (maker.update(params, maker.init(params), params)[0]["w"] for maker in (ours, theirs))
    np.testing.assert_array_equal(got, wanted)
    message = "optimizer.options has 'epsi', nadam does not: did you mean eps?"
    assert refusal_of_name("nadam", "epsi 0.5") == message


def test_an_optimizer_that_needs_more_than_a_rate_takes_it_from_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of optax's does today; it would be refused for missing "1 required positional argument"."""

    def halved(learning_rate: Any, share: float, steps: int) -> optax.GradientTransformation:
        return optax.sgd(learning_rate * share / steps)

    monkeypatch.setattr(optimizers, "optimizers", lambda: {"halved": halved})
    made = make_optimizer(config_of("--optimizer.name halved --optimizer.options share 0.5 steps 2"), 0.4)
    assert made.update(np.float32(1.0), made.init(np.float32(1.0)))[0] == pytest.approx(-0.1)
    assert refusal_of_name("halved") == (
        "optimizer.options lacks share and steps of halved: write e.g. options = { share = 0.1, steps = 1 }"
    )


def test_every_schedule_of_optax_works_or_is_refused_in_one_line() -> None:
    """Those that are listed as working are exactly those that work, in the message and in the help."""
    listed = re.findall(r"\w+", str(refusal_of_schedule("xyzzy")).partition("one of ")[2].removesuffix(" is wanted"))
    refused = {name: refusal_of_schedule(name) for name in [*OWN_RATES, *SCHEDULES]}
    work = {name for name, message in refused.items() if message is None}
    assert sorted(listed) == sorted(work)
    assert len(work) >= len(OWN_RATES) + 9
    comment = field_comments(OptimizerConfig)["rate_schedule"]
    assert set(re.findall(r"\w+", comment)) & {*OWN_RATES, *SCHEDULES} == work
    said = [message for message in refused.values() if message is not None]
    assert [message for message in said if not message.startswith("optimizer.rate_schedule ") or "\n" in message] == []


def test_names_in_the_help_work() -> None:
    comment = field_comments(OptimizerConfig)["name"]
    named = [name for name in re.findall(r"\w+", comment.partition(":")[2]) if name not in ("and", "many", "more")]
    assert len(named) >= 5
    assert [name for name in named if refusal_of_name(name) is not None] == []


@pytest.mark.parametrize(
    "name", ["piecewise_constant_schedule", "piecewise_interpolate_schedule", "sgdr_schedule", "join_schedules"]
)
def test_a_schedule_that_numbers_do_not_describe(name: str) -> None:
    """piecewise_constant_schedule was unknown, and warmup_constant_schedule meant."""
    message = (
        f"optimizer.rate_schedule '{name}' needs more than the numbers that rate_options may hold: one of constant, "
    )
    assert str(refusal_of_schedule(name)).startswith(message)


def test_what_a_schedule_lacks_is_told_at_once_and_helps() -> None:
    """One option was told at a time, and an end_value of 0.1 where the first rate is 0.003."""
    for name in optimizers.schedules():
        words = f"--optimizer.rate_schedule {name}"
        try:
            make_schedule(config_of(words), 10)
        except InputError as error:
            table = str(error).partition("rate_options = ")[2]
            make_schedule(load(overrides=[*words.split(), "--optimizer.rate_options", table]), 10)
    with pytest.raises(
        InputError, match=r"lacks end_value and power of polynomial_schedule: .*e = 0.0, power = 1.0 }$"
    ):
        make_schedule(config_of("--optimizer.rate_schedule polynomial_schedule"), 10)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--optimizer.name sgd --optimizer.options momentum high",
            "optimizer.options: momentum is 'high', wanted a nu",
        ),
        (
            "--optimizer.rate_schedule linear_schedule --optimizer.rate_options end_value low",
            "optimizer.rate_options: end_value is 'low', wanted a number",
        ),
    ],
)
def test_a_text_is_no_number_where_there_is_no_default(words: str, message: str) -> None:
    """Of these it was said that "Only integer scalar arrays can be converted to a scalar index"."""
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        make_optimizer(config_of(words), make_schedule(config_of(words), 10))


def test_an_option_that_may_be_anything_may_be_a_switch() -> None:
    assert refusal_of_name("adamw", "mask true") is None


# --- options ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "mu_dtype bogus",
            "optimizer.options is mu_dtype = 'bogus', which optax does not take for adam (data type 'bo",
        ),
        (f"b1 {10**21}", f"optimizer.options is b1 = {10**21}, which optax does not take for adam ("),
    ],
)
def test_options_that_optax_does_not_take(words: str, message: str) -> None:
    """They ended in tracebacks, some only when the first gradient came."""
    with pytest.raises(InputError) as caught:
        make_optimizer(config_of(f"--optimizer.name adam --optimizer.options {words}"))
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("): pass others, or leave them out")


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("warmup_cosine_decay_schedule", "warmup_steps 5"),
        ("cosine_decay_schedule", "decay_steps 0"),
        ("warmup_constant_schedule", f"warmup_steps {10**12}"),
        ("cosine_onecycle_schedule", "div_factor 0"),
        ("cosine_onecycle_schedule", "final_div_factor 0"),
        ("linear_onecycle_schedule", "div_factor 0"),
        ("linear_onecycle_schedule", "final_div_factor 0"),
    ],
)
def test_rates_that_optax_does_not_take(schedule: str, options: str) -> None:
    """A warm-up longer than the run, nothing to decay over, more than can be counted; dividing by zero raised."""
    config = config_of(f"--train.epochs 1 --optimizer.rate_schedule {schedule} --optimizer.rate_options {options}")
    name, value = options.split()
    message = (
        rf"^optimizer.rate_options is {name} = {value}, which optax does not take for {schedule}, in a run of 3 upd"
    )
    with pytest.raises(InputError, match=message):
        make_schedule(config, 3)


@pytest.mark.parametrize(
    ("schedule", "options", "rate", "update"),
    [
        ("cosine_decay_schedule", "alpha -3", "-0.56", 11),
        ("exponential_decay", "decay_rate -1", "nan", 1),
        ("exponential_decay", "decay_rate -1 transition_steps 1 staircase true", "-3", 1),
        ("linear_schedule", "end_value -1", "-0.0667", 23),
        ("polynomial_schedule", "power -2 end_value 1 transition_steps 29", "inf", 29),
    ],
)
def test_rates_that_are_none(schedule: str, options: str, rate: str, update: int) -> None:
    """Such a run made its parameters nan, or climbed the loss, and said nothing of the options."""
    config = config_of(
        f"--optimizer.learning_rate 3 --optimizer.rate_schedule {schedule} --optimizer.rate_options {options}"
    )
    with pytest.raises(InputError) as caught:
        make_schedule(config, 10)
    found = str(caught.value)
    name, value = options.split()[:2]
    assert found.startswith(f"optimizer.rate_options is {name} = {value}")
    assert f"which makes the rate of {schedule} {rate}" in found
    assert f"at update {update} of 30, wanted a finite one of at least 0: pass others, or leave them out" in found


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e39"])
def test_options_are_finite(value: str) -> None:
    """A momentum of nan made the parameters nan, and an alpha of nan the rate."""
    wanted = (
        rf" is {re.escape(repr(float(value)))}, wanted a finite number that float32 holds: pass another, or leave it"
    )
    with pytest.raises(InputError, match=f"^optimizer.options: momentum{wanted}"):
        make_optimizer(config_of(f"--optimizer.name sgd --optimizer.options momentum {value}"))
    with pytest.raises(InputError, match=f"^optimizer.rate_options: alpha{wanted}"):
        make_schedule(config_of(f"--optimizer.rate_options alpha {value}"), 10)


def test_the_first_rate_may_last_longer_than_any_run() -> None:
    """More epochs than int32 counts updates of were an OverflowError."""
    words = "--optimizer.rate_schedule epochs --optimizer.learning_rate 1 --optimizer.rate_epochs"
    rate = make_schedule(config_of(f"{words} {2**31 - 1}"), 10)
    assert callable(rate)
    assert [float(rate(update)) for update in (0, 29, 2**31 - 2)] == [1.0, 1.0, 1.0]
    with pytest.raises(InputError, match=r"optimizer.rate_epochs is 100000000000, wanted at least 1 and at most 2,147"):
        config_of(f"{words} 100000000000")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("constant_schedule", "constant"),
        ("Plateau", "plateau"),
        ("constnt", "constant"),
        ("plateau_schedule", "plateau"),
        ("cosine", "cosine_decay_schedule"),
        ("linear", "linear_schedule"),
        ("warmup_constant", "warmup_constant_schedule"),
    ],
)
def test_a_schedule_that_was_meant(name: str, meant: str) -> None:
    """Optax's constant_schedule is "constant" here, and warmup_constant_schedule was suggested."""
    message = (
        f"^optimizer.rate_schedule '{name}' is unknown: did you mean {meant}\\? One of constant, plateau, .* is wanted$"
    )
    with pytest.raises(InputError, match=message):
        make_schedule(config_of(f"--optimizer.rate_schedule {name}"), 10)


def test_a_schedule_without_an_option_is_told_one_that_fits() -> None:
    """It was told to write warmup_steps = 0.1."""
    message = (
        r"optimizer.rate_options lacks warmup_steps of warmup_constant_schedule: write e.g. "
        r"rate_options = { warmup_steps = 3 }$"
    )
    with pytest.raises(InputError, match=message):
        make_schedule(config_of("--optimizer.rate_schedule warmup_constant_schedule"), 10)
    with pytest.raises(InputError, match=r"^optimizer.rate_options: warmup_steps is 0\.1, wanted a whole number"):
        make_schedule(
            config_of("--optimizer.rate_schedule warmup_constant_schedule --optimizer.rate_options warmup_steps 0.1"),
            10,
        )


def test_a_run_of_more_updates_than_can_be_counted() -> None:
    message = r"train.epochs is 1000000, which makes 30,000,000,000 updates, wanted at most .*: pass at most 71,582$"
    with pytest.raises(InputError, match=message):
        make_schedule(config_of("--train.epochs 1000000"), 30_000)


def test_what_optax_says_to_programmers_is_not_said_to_users() -> None:
    """The command line printed two lines of warning about an optimizer, then that it cannot be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_optimizer(config_of("--optimizer.name optimistic_adam --optimizer.rate_schedule constant"))


def test_weight_decay_is_added_to_the_gradient() -> None:
    """As torch.optim.SGD has it: the rate is on both."""
    optimizer = make_optimizer(config_of("--optimizer.name sgd --optimizer.weight_decay 0.1"), 0.5)
    params, gradients = np.array([2.0, -4.0]), np.array([1.0, 1.0])
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates, -0.5 * (gradients + 0.1 * params), rtol=1e-6)
