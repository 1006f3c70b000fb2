"""What the loop decides by validations: averaging and early stopping; and steps of random lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.data import RandomLengthBatches, iterate
from mp_lstm.errors import InputError
from mp_lstm.training import checkpoint
from mp_lstm.training.fit import SplitResult, evaluate, fit
from mp_lstm.training.loop import Trainer, is_non_monotone
from mp_lstm.training.metrics import counted_compilations, read_metrics
from mp_lstm.training.setup import Setup
from mp_lstm.training.warm_up import WarmUp

Tiny = Callable[..., Setup]


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [event for event in read_metrics(run_dir / "metrics.jsonl") if event["event"] in kinds]
    return [{name: value for name, value in event.items() if name != "tokens_per_second"} for event in found]


def say(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Makes validations find these losses, and the test the last."""
    left = iter(losses)
    monkeypatch.setattr("mp_lstm.training.loop.evaluate", lambda *_: SplitResult(next(left), 7.0, 57))


def numbers(setup: Setup, run_dir: Path) -> list[np.ndarray]:
    state = checkpoint.restore(setup.pipe, run_dir).state
    return [np.array(leaf) for leaf in jax.tree.leaves((state.stages, state.rate, state.step))]


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=12), st.integers(0, 5))
def test_the_criterion_is_algorithm_1_of_the_paper(losses: list[float], n: int) -> None:
    logs: list[float] = []
    for t, v in enumerate(losses):
        paper = t > n and v > min(logs[i] for i in range(t - n))
        assert is_non_monotone(logs, v, n) == paper
        logs.append(v)


# --- averaging ---

AVERAGE = {"average": True, "average_after": 1, "learning_rate": 0.5, "name": "sgd", "rate_schedule": "constant"}


def test_averaging_begins_by_the_criterion_and_survives_a_stop(tiny: Tiny, tmp_path: Path, monkeypatch) -> None:
    """The third validation is worse than the first: the average is of the steps after it, and what is tested."""
    say(monkeypatch, 1.0, 0.9, 1.1, 0.8, 0.7)
    setup = tiny(1, optimizer=AVERAGE, train={"epochs": 4})
    fit(setup, tmp_path / "whole")
    say(monkeypatch, 1.0, 0.9, 1.1, 5.0, 0.8, 0.7)  # 5.0 is there because the first part ends
    parts = tmp_path / "parts"
    fit(setup._replace(config=config_of(setup, max_steps=34)), parts)
    fit(setup, parts, resume=True)
    for one, other in zip(numbers(setup, tmp_path / "whole"), numbers(setup, parts), strict=True):
        np.testing.assert_array_equal(one, other)
    assert events(tmp_path / "whole", "train", "valid", "test") == events(parts, "train", "valid", "test")
    state, notes = checkpoint.restore(setup.pipe, parts)
    assert notes.averages
    assert notes.best is not None
    assert notes.best.step == 40
    updates = [leaf for leaf in jax.tree.leaves(state.stages) if leaf.dtype == np.int32]
    assert [int(count) for count in updates] == [10] * 4  # one a row
    average = setup.pipe.load(setup.pipe.params(state, "average"))
    (test,) = events(parts, "test")
    assert test["loss"] == pytest.approx(evaluate(setup, average, "test").loss, rel=1e-5)
    assert test["loss"] != pytest.approx(evaluate(setup, setup.pipe.load(setup.pipe.params(state)), "test").loss)


def config_of(setup: Setup, **train: Any) -> Any:
    return dataclasses.replace(setup.config, train=dataclasses.replace(setup.config.train, **train))


# --- early stopping ---


def test_patience(tiny: Tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    say(monkeypatch, 1.0, 0.9, 0.9, 0.1)
    setup = tiny(train={"epochs": 9, "patience": 1})
    result = fit(setup, tmp_path)
    assert result.best is not None
    assert (result.steps, result.best.step, result.signal) == (30, 20, None)
    assert events(tmp_path, "stop") == [{"event": "stop", "step": 30, "epoch": 3, "waited": 1}]
    said = "stopped early after step 30, validations without a better one: 1 (train.patience)"
    assert said in capsys.readouterr().out
    fit(setup, tmp_path, resume=True)  # and does not train on
    assert events(tmp_path, "done")[-1]["steps"] == 30
    assert "it had stopped early: raise train.patience to go on training" in capsys.readouterr().out


def test_a_run_killed_as_it_stops_early_keeps_that_it_did(tiny: Tiny, tmp_path: Path, monkeypatch) -> None:
    """It was told after the state had been saved, so going on cut it off, and never told it again."""
    say(monkeypatch, 1.0, 0.9, 0.9, 0.1)
    setup = tiny(train={"epochs": 9, "patience": 1})

    def killed(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Trainer, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(setup, tmp_path)
    fit(setup, tmp_path, resume=True)
    assert events(tmp_path, "stop") == [{"event": "stop", "step": 30, "epoch": 3, "waited": 1}]


def test_a_validation_that_the_end_of_a_run_made_is_nothing_to_those_that_follow(
    tiny: Tiny, tmp_path: Path, monkeypatch, capsys
) -> None:
    """It was kept as the best there was, so the next one was no better: the run that went on stopped early."""
    said = (1.0, 0.9, 0.8, 0.7)
    setup = tiny(train={"epochs": 4, "patience": 1})
    say(monkeypatch, *said)
    whole = fit(setup, tmp_path / "whole")
    say(monkeypatch, *said[:2], 0.1, *said[2:])  # 0.1 is there because the first part ends
    parts = tmp_path / "parts"
    first = fit(setup._replace(config=config_of(setup, max_steps=23)), parts)
    assert first.best is not None
    assert first.best.step == checkpoint.best(parts) == 23, "what the run found is tested, and written with"
    capsys.readouterr()
    again = fit(setup, parts, resume=True)
    forgotten = (
        f"resumed after step 23; the validation there (perplexity {first.best.perplexity:,.2f}) was made because"
    )
    assert f"\n{forgotten} the run had ended, so it counts no more\n" in capsys.readouterr().out
    assert (again.steps, again.best, again.test) == (whole.steps, whole.best, whole.test)
    assert events(tmp_path / "whole", "train", "valid", "test") == events(parts, "train", "valid", "test")


def test_another_every_k_on_resuming_still_trains_on_every_batch(tiny: Tiny, tmp_path: Path) -> None:
    """Updates of both kinds were counted as one: the second epoch was cut to what was left of half as many."""
    first = fit(tiny(train={"epochs": 1}), tmp_path)
    assert first.steps == 10
    other = tiny(train={"epochs": 3}, optimizer={"every_k": 3})
    assert fit(other, tmp_path, resume=True).steps == 10 + 4 + 4
    assert events(tmp_path, "valid")[-1]["epoch"] == 3


# --- random lengths ---

RANDOM = {"mode": "contiguous", "length": 10, "random_length": 10, "batch_size": 2}


@pytest.mark.slow
def test_random_lengths_compile_nothing_over_a_thousand_steps(tiny: Tiny) -> None:
    setup = tiny(1, data=RANDOM, pipeline={"chunk": 10})
    source, pipe = setup.sources.train, setup.pipe
    assert isinstance(source, RandomLengthBatches)
    assert len(source.buckets) <= 2 * (30 // 10 + 2)
    WarmUp(setup, lambda: 0).complete()
    state, shapes = pipe.init(jax.random.key(0)), set()
    with counted_compilations() as compiled:
        for _, batch in iterate(source, epochs=-(-1000 // source.num_batches())):
            state, _ = pipe.step(dataclasses.replace(state, rate=len(batch.inputs) / 10), batch)
            shapes.add(len(batch.inputs))
    assert state.step >= 1000
    assert compiled() == 0
    assert shapes == set(source.buckets)


def test_the_rate_is_scaled_by_the_length(tiny: Tiny, tmp_path: Path) -> None:
    setup = tiny(1, data=RANDOM, pipeline={"chunk": 10}, train={"epochs": 1, "log_every": 1})
    fit(setup, tmp_path)
    lengths = [len(batch.inputs) for _, batch in iterate(setup.sources.train, epochs=1)]
    assert len(set(lengths)) > 1
    rates = [event["learning_rate"] for event in events(tmp_path, "train")]
    assert rates == pytest.approx([setup.learning_rate(0) * length / 10 for length in lengths])
    assert checkpoint.restore(setup.pipe, tmp_path).state.rate == 1.0
    assert events(tmp_path, "done")[0]["compiled_after_warmup"] == 0


def test_random_lengths_are_for_consecutive_text(tiny: Tiny) -> None:
    with pytest.raises(
        InputError, match=r"^\[data\] random_length is for consecutive text: leave it out, or pass --da"
    ):
        tiny(data={"random_length": 5})
    longer = r"^\[data.random_length\] multiple is 11, wanted at most the length, which is 10$"
    with pytest.raises(InputError, match=longer):
        tiny(data=RANDOM | {"random_length": 11})
