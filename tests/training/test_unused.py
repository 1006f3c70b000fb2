"""Fields that do nothing: refused where somebody set them, and only there."""

from __future__ import annotations

import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from mp_lstm.errors import InputError
from mp_lstm.training.config import Config, OptimizerConfig, load, load_saved, save
from mp_lstm.training.optimizers import OWN_RATES
from mp_lstm.training.overrides import flag_types
from mp_lstm.training.unused import ONLY_WITH

SCHEDULE = "does nothing while optimizer.rate_schedule is"


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.toml"
    path.write_text(f"[optimizer]\n{text}")
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--optimizer.rate_factor 0.3",
            f'optimizer.rate_factor is 0.3, which {SCHEDULE} "cosine_decay_schedule": leave it out, or set '
            'optimizer.rate_schedule to "plateau"',
        ),
        (
            "--optimizer.plateau_threshold 0 --optimizer.rate_schedule epochs",
            f'optimizer.plateau_threshold is 0.0, which {SCHEDULE} "epochs": leave it out, or set '
            'optimizer.rate_schedule to "plateau"',
        ),
        (
            "--optimizer.rate_epochs=9 --optimizer.rate_schedule=plateau",
            f'optimizer.rate_epochs is 9, which {SCHEDULE} "plateau": leave it out, or set optimizer.rate_schedule to '
            '"epochs"',
        ),
        (
            "--optimizer.rate-divisor 3",
            f'optimizer.rate_divisor is 3.0, which {SCHEDULE} "cosine_decay_schedule": leave it out, or set '
            'optimizer.rate_schedule to "epochs"',
        ),
        (
            "--optimizer.rate_schedule constant --optimizer.rate_options alpha 0",
            f'optimizer.rate_options is {{ "alpha" = 0 }}, which {SCHEDULE} "constant": leave it out, or set '
            "optimizer.rate_schedule to a schedule of optax",
        ),
        (
            "--data.length 70",
            'data.length is 70, which does nothing while data.mode is "sentences": leave it out, or set data.mode to '
            '"contiguous"',
        ),
        (
            "--data.buckets 8 16 --data.mode contiguous",
            'data.buckets is [8, 16], which does nothing while data.mode is "contiguous": leave it out, or set '
            'data.mode to "sentences"',
        ),
        (
            "--optimizer.average_after 3",
            "optimizer.average_after is 3, which does nothing while optimizer.average is false: leave it out, or set "
            "optimizer.average to true",
        ),
    ],
)
def test_a_field_that_does_nothing_is_refused(tmp_path: Path, words: str, message: str) -> None:
    """Such a run trained as if it had not been set, and said nothing."""
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        load(overrides=words.split())
    path = tmp_path / "empty.toml"
    path.touch()
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        load(path, words.split())


def test_a_file_may_not_set_what_does_nothing(tmp_path: Path) -> None:
    path = file_of(tmp_path, "rate_epochs = 9\nrate_schedule = 'constant'")
    message = f'{path}: optimizer.rate_epochs is 9, which {SCHEDULE} "constant": leave it out, or set '
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        load(path)
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        load(path, ["--train.epochs", "2"])
    with pytest.raises(InputError, match=re.escape(f'{path}: optimizer.rate_epochs is 9, which {SCHEDULE} "plateau"')):
        load(path, ["--optimizer.rate_schedule", "plateau"])


@pytest.mark.parametrize(
    "words",
    [
        "--optimizer.rate_schedule epochs",  # now it does something
        "--optimizer.rate_epochs 4",  # the default
        "--optimizer.rate_schedule epochs --optimizer.rate_epochs 7",
    ],
)
def test_overrides_make_good_what_a_file_set(tmp_path: Path, words: str) -> None:
    load(file_of(tmp_path, "rate_epochs = 9\nrate_schedule = 'constant'"), words.split())


def test_overrides_may_make_what_a_file_set_do_nothing(tmp_path: Path) -> None:
    """A recipe can be tried at another schedule without a copy of it."""
    path = file_of(tmp_path, "rate_epochs = 9\nrate_divisor = 1.5\nrate_schedule = 'epochs'")
    assert load(path, ["--optimizer.rate_schedule", "constant"]).optimizer.rate_epochs == 9
    with pytest.raises(InputError, match=f'^optimizer.rate_epochs is 8, which {SCHEDULE} "constant"'):
        load(path, ["--optimizer.rate_schedule", "constant", "--optimizer.rate_epochs", "8"])
    path = file_of(tmp_path, "rate_options = { alpha = 0.1 }")
    assert load(path, ["--optimizer.rate_schedule", "constant"]).optimizer.rate_options == {"alpha": 0.1}


def test_what_has_its_default_is_not_refused(tmp_path: Path) -> None:
    default = OptimizerConfig()
    words = f"--optimizer.rate_factor {default.rate_factor} --optimizer.average_after {default.average_after}"
    assert load(overrides=words.split()) == Config()
    assert load(file_of(tmp_path, f"rate_epochs = {default.rate_epochs}\nrate_options = {{}}")) == Config()


def test_what_was_saved_loads_even_so(tmp_path: Path) -> None:
    """A run's file holds all fields, also those that an override made do nothing."""
    path = tmp_path / "config.toml"
    config = replace(Config(), optimizer=OptimizerConfig(rate_epochs=9, average_after=3, rate_schedule="constant"))
    save(config, path)
    assert load_saved(path) == config
    assert load(path) == config  # as a run is resumed
    assert load(path, ["--train.epochs", "9"]).optimizer == config.optimizer
    with pytest.raises(InputError, match=f'^optimizer.rate_factor is 0.3, which {SCHEDULE} "constant"'):
        load(path, ["--optimizer.rate_factor", "0.3"])
    first, _, older = path.read_text().partition("\n")
    assert first.startswith("# The ")
    path.write_text(older)
    assert load_saved(path) == config


@pytest.mark.parametrize("name", OWN_RATES)
def test_options_are_for_schedules_of_optax(name: str) -> None:
    with pytest.raises(InputError, match=r"^optimizer.rate_options is .* set optimizer.rate_schedule to a schedule of"):
        load(overrides=["--optimizer.rate_schedule", name, "--optimizer.rate_options", "alpha", "0"])


@pytest.mark.parametrize("name", ONLY_WITH)
def test_the_table_is_about_fields(name: str) -> None:
    """And about a field whose default or whose other value makes it work, or no configuration could use it."""
    other = ONLY_WITH[name]
    assert {f"--{name}", f"--{other.field}"} <= set(flag_types(Config))
    default = attrgetter(other.field)(Config())
    tried = [default, not default] if isinstance(default, bool) else [default, *other.wanted.replace('"', "").split()]
    assert True in map(other.allowed, tried)
