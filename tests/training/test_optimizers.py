"""Options that optax refuses: one line that names the field. What is made by name is tested with `build`."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from mp_lstm.errors import InputError
from mp_lstm.training.config import Config, load
from mp_lstm.training.optimizers import make_optimizer, make_schedule


def config_of(words: str) -> Config:
    return load(overrides=words.split())


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
        ("constnt", "constant"),
        ("plateau_schedule", "plateau"),
        ("cosine", "cosine_decay_schedule"),
        ("linear", "linear_schedule"),
        ("warmup_constant", "warmup_constant_schedule"),
    ],
)
def test_a_schedule_that_was_meant(name: str, meant: str) -> None:
    """Optax's constant_schedule is "constant" here, and warmup_constant_schedule was suggested."""
    message = f"^optimizer.rate_schedule '{name}' is unknown: did you mean {meant}\\?$"
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
        make_optimizer(config_of("--optimizer.name noisy_sgd --optimizer.rate_schedule constant"))


def test_weight_decay_is_added_to_the_gradient() -> None:
    """As torch.optim.SGD has it: the rate is on both."""
    optimizer = make_optimizer(config_of("--optimizer.name sgd --optimizer.weight_decay 0.1"), 0.5)
    params, gradients = np.array([2.0, -4.0]), np.array([1.0, 1.0])
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates, -0.5 * (gradients + 0.1 * params), rtol=1e-6)
