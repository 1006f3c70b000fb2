"""Options that optax refuses: one line that names the field. What is made by name is tested with `build`."""

from __future__ import annotations

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
    ],
)
def test_rates_that_optax_does_not_take(schedule: str, options: str) -> None:
    """A warm-up longer than the run, nothing to decay over, more than can be counted."""
    config = config_of(f"--train.epochs 1 --optimizer.rate_schedule {schedule} --optimizer.rate_options {options}")
    name, value = options.split()
    message = (
        rf"optimizer.rate_options is {name} = {value}, which optax does not take for {schedule}, in a run of 3 upd"
    )
    with pytest.raises(InputError, match=message):
        make_schedule(config, 3)


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
