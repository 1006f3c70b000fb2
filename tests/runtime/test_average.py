"""The average of parameters: of those after the updates since it was switched on, kept by row, evaluated in place."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.runtime import average as averages
from mp_lstm.runtime.optimizer import check_leafwise
from mp_lstm.training.metrics import counted_compilations
from reference import assert_close

OPTIMIZER = optax.chain(optax.sgd(0.5), mp_lstm.average_parameters())


def pipe_of(devices: list[jax.Device], partition: tuple[int, ...], optimizer: Any = OPTIMIZER) -> mp_lstm.Pipeline:
    model = mp_lstm.language_model(vocab=7, embed=4, hidden=4, layers=2, tie=True)
    plan = mp_lstm.make_plan(model, batch_size=2, lengths=(3,), devices=devices, partition=partition)
    return mp_lstm.make_pipeline(model, plan, optimizer)


def batch_of(seed: int) -> mp_lstm.Batch:
    return mp_lstm.Batch(*np.random.default_rng(seed).integers(0, 7, (2, 3, 2)))


def test_it_is_the_mean_of_the_parameters_since_it_was_switched_on() -> None:
    """By numpy, over updates that a rate factor changes, which the optimizer does not see."""
    params, rng = np.array([1.0, -2.0], np.float32), np.random.default_rng(0)
    state, seen = OPTIMIZER.init(params), []
    for step in range(9):
        if step == 4:
            state, seen = averages.started(state), []
        gradient = rng.normal(size=2).astype(np.float32)
        updates, state = OPTIMIZER.update(gradient, state, params)
        np.testing.assert_array_equal(updates, np.float32(-0.5) * gradient)
        params = np.asarray(params + np.float32(0.3) * np.asarray(updates))
        seen.append(params)
        wanted = np.mean(seen, axis=0) if step >= 4 else params
        np.testing.assert_allclose(averages.average(params, state), wanted, rtol=1e-6)
    assert len(seen) == 5


def test_before_the_first_update_it_is_the_parameters() -> None:
    params = jnp.ones(2)
    for state in (OPTIMIZER.init(params), averages.started(OPTIMIZER.init(params))):
        np.testing.assert_array_equal(averages.average(params, state), params)


def test_it_treats_each_leaf_alone() -> None:
    check_leafwise(optax.chain(optax.adam(1e-2), mp_lstm.average_parameters(on=True)))


def test_it_needs_the_parameters() -> None:
    with pytest.raises(ValueError, match="pass them to update"):
        OPTIMIZER.update(jnp.ones(2), OPTIMIZER.init(jnp.ones(2)))


def test_a_pipeline_evaluates_the_average_wherever_its_rows_are(devices: list[jax.Device]) -> None:
    """Also of a tied table, which the decoder borrows. Nothing is compiled for it after the warm-up."""
    pipe = pipe_of(devices[:3], (1, 2, 1))
    pipe.warm_up([batch_of(0)])
    state, seen = pipe.init(jax.random.key(0)), []
    with counted_compilations() as compiled:
        for step in range(5):
            if step == 2:
                state, seen = pipe.start_average(state), []
            state, _ = pipe.step(dataclasses.replace(state, rate=1.0 + step), batch_of(step))
            seen.append(pipe.params(state))
        last, found = pipe.params(state), pipe.evaluate(state, batch_of(9), params="average")
        average = pipe.averaged(state)
        again = pipe.params(pipe.averaged(average))
    assert compiled() == 0
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *seen)
    assert_close(pipe.params(state, "average"), mean, 2e-5)
    assert_close(again, mean, 2e-5)
    assert_close(found.loss, pipe.evaluate(pipe.load(mean), batch_of(9)).loss, 2e-5)
    assert_close(last, seen[-1], 0.0)
    state, _ = pipe.step(state, batch_of(6))  # an evaluation took nothing from it
    assert_close(
        pipe.params(state, "average"), jax.tree.map(lambda a, b: (3 * a + b) / 4, mean, pipe.params(state)), 2e-5
    )


def test_what_cannot_be_averaged_is_explained(devices: list[jax.Device]) -> None:
    pipe = pipe_of(devices[:1], (4,), optax.sgd(0.1))
    state = pipe.init(jax.random.key(0))
    for call in (lambda: pipe.params(state, "average"), lambda: pipe.start_average(state)):
        with pytest.raises(InputError, match=r"^the optimizer keeps no average .*: pass optax.chain\(optimizer, aver"):
            call()
    with pytest.raises(InputError, match=r"^params is 'mean', one of last, average is wanted$"):
        pipe.evaluate(state, batch_of(0), params="mean")
