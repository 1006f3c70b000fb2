"""The scripts in scripts/examples run, are short, and beat their naive baselines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts" / "examples"


def run(name: str, *words: str) -> tuple[int, list[float]]:
    """Exit status and the numbers printed: the model's and the baseline's."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    command = [sys.executable, str(SCRIPTS / name), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", done.stdout)]
    assert len(numbers) == 2, done.stderr
    return done.returncode, numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tagger.py", "forecaster.py"])
def test_an_example_beats_its_baseline(name: str) -> None:
    status, (model, naive) = run(name)
    assert status == 0
    assert model > 99 if name == "tagger.py" else model < naive / 4


def test_a_short_forecast_is_better_already() -> None:
    status, (model, naive) = run("forecaster.py", "--steps", "40")
    assert (status, model < naive) == (0, True)


@pytest.mark.slow
def test_without_training_an_example_says_that_it_is_no_better() -> None:
    """A tagger that has learnt nothing."""
    status, (model, naive) = run("tagger.py", "--epochs", "0")
    assert (status, model < naive) == (1, True)


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_under_60_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
