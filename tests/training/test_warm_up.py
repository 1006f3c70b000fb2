"""When a run's programs are compiled."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from mp_lstm.data import iterate
from mp_lstm.layers.model import step_shape
from mp_lstm.runtime.pipeline import Pipeline
from mp_lstm.training.fit import fit
from mp_lstm.training.metrics import counted_compilations, read_metrics
from mp_lstm.training.setup import Setup
from mp_lstm.training.warm_up import WarmUp

Tiny = Callable[..., Setup]


@pytest.fixture
def fresh(tiny: Tiny) -> Setup:
    """A setup without programs."""
    setup = tiny(2)
    setup.pipe.programs.clear()
    return setup


def phases(setup: Setup, *lengths: int) -> set[str]:
    """Phases of the programs by which buckets are served."""
    return {key.phase for length in lengths for key in setup.pipe.programs[length]}


def test_the_first_step_waits_for_its_own_bucket_alone(fresh: Setup) -> None:
    """All programs of all buckets came before the first step: of the original's model that took most of a minute."""
    batches = next(
        [batch]
        for _, batch in iterate(fresh.sources.train, epochs=1)
        if step_shape(batch)[0] == max(fresh.plan.buckets)
    )
    warm_up = WarmUp(fresh, lambda: 0)
    warm_up.before_step(batches)
    first = len(fresh.pipe.programs)
    assert {"forward", "backward", "weight_gradient"} <= phases(fresh, 8)
    with pytest.raises(KeyError):
        fresh.pipe.programs[4]
    warm_up.before_step(batches)
    assert {"forward", "backward"} <= phases(fresh, 4)
    assert "evaluate" not in phases(fresh, 4, 8)
    assert not warm_up.done
    warm_up.before_step(batches)
    assert warm_up.done
    assert "evaluate" in phases(fresh, 4, 8)
    everything = len(fresh.pipe.programs)
    assert first < everything
    warm_up.before_step(batches)
    warm_up.before_evaluation()
    assert len(fresh.pipe.programs) == everything


def test_it_compiles_what_warming_up_by_hand_does(fresh: Setup, tiny: Tiny) -> None:
    WarmUp(fresh, lambda: 0).complete()
    bucketwise = len(fresh.pipe.programs)
    fresh.pipe.programs.clear()
    fresh.pipe.warm_up()
    assert len(fresh.pipe.programs) == bucketwise


def test_a_program_that_a_step_compiles_is_unforeseen(fresh: Setup) -> None:
    batches = [fresh.sources.train.batch(0, 0)]
    with counted_compilations() as compiled:
        warm_up = WarmUp(fresh, compiled)
        warm_up.before_step(batches)
        assert compiled() > 0
        assert warm_up.unforeseen == 0
        fresh.pipe.infer(fresh.pipe.init(jax.random.key(0)), batches[0].inputs)
        assert warm_up.unforeseen > 0


def test_no_step_is_timed_while_programs_are_compiled(fresh: Setup, tmp_path: Path, monkeypatch: Any) -> None:
    """Else the speed that is written down of the first steps would be the compiler's."""
    compile_now, clock, spent = Pipeline.warm_up, time.perf_counter, [0.0]

    def slow(self: Pipeline, *args: Any, **options: Any) -> None:
        spent[0] += 1e6
        compile_now(self, *args, **options)

    monkeypatch.setattr(Pipeline, "warm_up", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + spent[0])
    fit(fresh, tmp_path)
    assert spent[0] == 3e6
    lines = [event for event in read_metrics(tmp_path / "metrics.jsonl") if event["event"] == "train"]
    assert sum(line["tokens"] / line["tokens_per_second"] for line in lines) < 1e6


def test_a_run_of_one_step_compiles_one_bucket_and_evaluations(fresh: Setup, tmp_path: Path, capsys: Any) -> None:
    setup = fresh._replace(config=with_steps(fresh, 1))
    fit(setup, tmp_path)
    (length,) = {step_shape(batch)[0] for batch in first(fresh, 1)}
    assert "backward" in phases(setup, length)
    assert "backward" not in phases(setup, *(set(setup.plan.buckets) - {length}))
    assert "programs (at most" not in capsys.readouterr().out
    (done,) = [event for event in read_metrics(tmp_path / "metrics.jsonl") if event["event"] == "done"]
    assert done["compiled_after_warmup"] == 0


def test_a_run_that_is_over_compiles_its_test_alone(fresh: Setup, tmp_path: Path) -> None:
    """Nothing was left to train or to validate: the test compiled its programs itself, as if they were unforeseen."""
    fit(fresh, tmp_path)
    fresh.pipe.programs.clear()
    fit(fresh, tmp_path, resume=True)
    assert {"evaluate", "mean"} == phases(fresh, 4, 8) | {"mean"}
    done = [event for event in read_metrics(tmp_path / "metrics.jsonl") if event["event"] == "done"]
    assert [event["compiled_after_warmup"] for event in done] == [0]


def with_steps(setup: Setup, steps: int) -> Any:
    return dataclasses.replace(setup.config, train=dataclasses.replace(setup.config.train, max_steps=steps))


def first(setup: Setup, count: int) -> Iterator[Any]:
    for _, (_, batch) in zip(range(count), iterate(setup.sources.train, epochs=1), strict=False):
        yield batch
