"""What a walk holds in flight: nothing once it is done, and never more than what somebody still reads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import numpy as np
import pytest

import examples
import mp_lstm
from mp_lstm.runtime.engine import Engine
from mp_lstm.runtime.walk import Walk

IN_FLIGHT = ("_arriving", "_running", "_dstates", "_saved", "_timed", "_summed")


@pytest.fixture(scope="module")
def pipe() -> mp_lstm.Pipeline:
    model = mp_lstm.language_model(**examples.SIZES)
    return examples.pipeline(model, lengths=(6,), chunk=2, microbatches=2, options={"donate": False})


BATCH = examples.random_batch(np.random.default_rng(0), 6, 4, lengths=[6, 0, 2, 5], resets=[True] * 4)


def test_nothing_is_left_in_flight(pipe: mp_lstm.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value has been taken by the one task that reads it: none is kept, none is read twice."""
    walks: list[Walk] = []
    run = Walk.run

    def seen(self: Walk, schedule: Any) -> None:
        run(self, schedule)
        walks.append(self)

    monkeypatch.setattr(Walk, "run", seen)
    pipe.step(pipe.load(examples.random_params(pipe.model)), [BATCH, BATCH])
    (walk,) = walks
    assert {name: len(getattr(walk, name)) for name in IN_FLIGHT} == dict.fromkeys(IN_FLIGHT, 0)


def test_what_a_backward_has_read_is_freed(pipe: mp_lstm.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations saved for one unit do not outlive its W: memory follows what is in flight."""
    saved: list[Any] = []
    run = Engine.run

    def seen(self: Engine, stage: Any, phase: str, *args: Any, **options: Any) -> Any:
        result = run(self, stage, phase, *args, **options)
        if phase == "forward":
            gates = [leaf for leaf in jax.tree.leaves(result[2]) if leaf.shape == (2, 2, 4)]
            saved.extend(weakref.ref(leaf) for leaf in gates)
        return result

    monkeypatch.setattr(Engine, "run", seen)
    state, metrics = pipe.step(pipe.load(examples.random_params(pipe.model)), BATCH)
    assert len(saved) > 20
    gc.collect()
    assert [ref for ref in saved if ref() is not None] == []
    jax.block_until_ready((state, metrics))


def test_a_walk_that_only_compiles_runs_nothing(pipe: mp_lstm.Pipeline) -> None:
    fresh = mp_lstm.make_pipeline(pipe.model, pipe.plan, examples.recorder())
    fresh.warm_up([BATCH])
    programs = len(fresh.programs)
    jax.block_until_ready(fresh.step(fresh.load(examples.random_params(pipe.model)), BATCH))
    assert len(fresh.programs) == programs
