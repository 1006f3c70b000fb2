"""A step waits for nothing, its stages work at the same time, and every array is where it belongs.

Waiting is found by a plug: a program that keeps the last stage's device busy for a second or two. A step that does not
look at any value is dispatched while the plug runs, and what does not depend on the plugged device is computed. No
transfer guard finds this out: on a CPU none of them sees `float(x)`.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import examples
import mp_lstm
from examples import SIZES, Plug, dispatch, random_batch, runs_seen
from mp_lstm.planning.schedule import Schedule
from mp_lstm.runtime import walk
from mp_lstm.runtime.measure import Interval, measure_steps
from mp_lstm.training import checkpoint
from mp_lstm.training.notes import Notes

# Waiting


@pytest.fixture(scope="module")
def pipe() -> mp_lstm.Pipeline:
    """Three chunks, two micro-batches, a tied decoder on the other stage, dropout, carried state."""
    model = mp_lstm.language_model(**SIZES | {"embed": 4}, dropout=0.5, tie=True)
    options = {"donate": False, "max_norm": 1.0}
    return examples.pipeline(model, lengths=(6,), chunk=2, microbatches=2, partition=(2, 2), options=options)


@pytest.fixture(scope="module")
def state(pipe: mp_lstm.Pipeline) -> mp_lstm.State:
    return pipe.load(examples.random_params(pipe.model))


@pytest.fixture(scope="module")
def window(pipe: mp_lstm.Pipeline, state: mp_lstm.State) -> Any:
    """A placed window, for which everything is compiled."""
    batch = random_batch(np.random.default_rng(0), 6, 4, lengths=[6, 4, 0, 5], resets=[True, False, False, True])
    window = pipe.place(batch)
    jax.block_until_ready(pipe.step(state, window))
    return window


@pytest.fixture(scope="module")
def plug(pipe: mp_lstm.Pipeline) -> Plug:
    return Plug(pipe.plan.devices[-1], seconds=1.0)


def test_step_returns_while_a_device_is_busy(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, window: Any, plug: Plug
) -> None:
    assert dispatch(pipe, state, window, plug) == (True, True)


def test_steps_are_dispatched_ahead(plug: Plug) -> None:
    """Two whole steps behind the plug, before anyone reads a metric; short ones, for a device queues 32 programs."""
    model = mp_lstm.language_model(**SIZES)
    pipe = examples.pipeline(model, lengths=(3,), schedule="serial")
    batches = [pipe.place(random_batch(np.random.default_rng(seed), 3, 4)) for seed in range(3)]
    state, _ = pipe.step(pipe.load(examples.random_params(model)), batches[0])
    jax.block_until_ready((state, batches))
    plugged = plug.insert()
    state, first = pipe.step(state, batches[1])
    state, second = pipe.step(state, batches[2])
    assert not plugged.is_ready()
    assert np.isfinite([float(first.loss), float(second.loss)]).all()


def reading(stage: Any, phase: str, result: Any) -> None:
    """What the original did: it looked at a number of every program."""
    float(jax.tree.leaves(result)[0].ravel()[0])


def reading_the_loss(stage: Any, phase: str, result: Any) -> None:
    if phase == "norm":
        np.asarray(result[1])


def blocking(stage: Any, phase: str, result: Any) -> None:
    if stage.is_last and phase == "forward":
        jax.block_until_ready(result)


@pytest.mark.parametrize("fault", [reading, reading_the_loss, blocking])
def test_a_wait_in_the_loop_is_found(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, window: Any, plug: Plug, fault: Callable[..., None]
) -> None:
    jax.block_until_ready(pipe.step(state, window))
    with runs_seen(fault):
        assert not dispatch(pipe, state, window, plug).returned


def test_a_wait_in_a_transfer_is_found(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, window: Any, plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of the host: what a stage sends is copied there and put on the other device."""

    def by_the_host(tree: Any, sharding: Any, what: Any = "") -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), sharding), tree)

    monkeypatch.setattr(walk, "transfer", by_the_host)
    assert not dispatch(pipe, state, window, plug).returned


# What enters a program


def test_nothing_is_sent_implicitly(pipe: mp_lstm.Pipeline, state: mp_lstm.State, window: Any) -> None:
    with jax.transfer_guard_host_to_device("disallow"):
        jax.block_until_ready(pipe.step(state, window))
        jax.block_until_ready(pipe.evaluate(state, window))


def test_an_implicit_transfer_is_found(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "transfer", lambda tree, sharding: jax.tree.map(np.asarray, tree))
    with jax.transfer_guard_host_to_device("disallow"), pytest.raises(Exception, match="transfer"):
        pipe.step(state, window)


def test_donations_are_used() -> None:
    """Where XLA cannot use a donated buffer it only warns: here warnings are errors, and the old state is gone."""
    model = mp_lstm.language_model(**SIZES)
    pipe = examples.pipeline(model, lengths=(4,), chunk=2, microbatches=2, optimizer=optax.adam(0.1))
    state = pipe.load(examples.random_params(model))
    batch = random_batch(np.random.default_rng(0), 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after, _ = pipe.step(state, batch)
        jax.block_until_ready(pipe.step(after, batch))
    consumed = [leaf for stage in state.stages for leaf in jax.tree.leaves((stage.own, stage.optimizer))]
    assert all(leaf.is_deleted() for leaf in consumed)


# Working at the same time


def tasks_of(schedule: Schedule, stage: int) -> list[str]:
    return [task.kind for task in schedule.tasks if task.stage == stage]


def check_timetable(schedule: Schedule, intervals: tuple[Interval, ...], steps: int) -> None:
    """Asserts that what ran, ran in the pattern of a timetable of two stages and one micro-batch."""
    ran: dict[int, list[Interval]] = defaultdict(list)
    for interval in intervals:
        if interval.kind:
            ran[interval.stage].append(interval)
    kinds = {stage: [interval.kind for interval in ran[stage]] for stage in (0, 1)}
    # (1) each device did its tasks in the schedule's order, step after step
    assert kinds == {stage: tasks_of(schedule, stage) * steps for stage in (0, 1)}

    chunks = schedule.chunks[0]
    forwards, backwards = ([[i for i in ran[s] if i.kind == kind] for s in (0, 1)] for kind in "FB")
    # (2) stage 1 begins a chunk when stage 0 has ended it, and the other way round coming back
    for below, above in zip(*forwards, strict=True):
        assert above.start >= below.end
    for below, above in zip(*backwards, strict=True):
        assert below.start >= above.end
    # (3) U waits for the W of both stages
    weights = [[i for i in ran[s] if i.kind == "W"] for s in (0, 1)]
    for step in range(steps):
        ends = max(weights[s][step].end for s in (0, 1))
        assert all([i for i in ran[s] if i.kind == "U"][step].start >= ends for s in (0, 1))
    # (4) while stage 1 runs a chunk, stage 0 runs a later one: not in every step, where the machine is busy
    overlapping = 0
    for step in range(steps):
        below, above = (stage[step * chunks : (step + 1) * chunks] for stage in forwards)
        pairs = [(low, high) for c, high in enumerate(above) for low in below[c + 1 :]]
        overlapping += any(low.start < high.end and high.start < low.end for low, high in pairs)
    assert overlapping, f"forwards of the two stages overlap in none of {steps} steps"


def measured(schedule: str, chunk: int | None) -> tuple[Schedule, tuple[Interval, ...], int]:
    """Traces some steps of a model large enough for its tasks to take milliseconds."""
    model = mp_lstm.language_model(vocab=200, embed=96, hidden=96, layers=2)
    pipe = examples.pipeline(model, batch_size=16, lengths=(32,), partition=(2, 2), schedule=schedule, chunk=chunk)
    state = pipe.load(examples.random_params(model, scale=0.1))
    batch = mp_lstm.Batch(z := np.zeros((32, 16), np.int32), z)
    state, _ = pipe.step(state, batch)
    steps = 10
    _, measured = measure_steps(pipe, state, [batch] * steps)
    return pipe.plan.schedule((32,)), measured.intervals, steps


def test_stages_work_in_the_pattern_of_the_timetable() -> None:
    schedule, intervals, steps = measured("wavefront", 8)
    check_timetable(schedule, intervals, steps)
    by_stage = [[i for i in intervals if i.stage == s and i.kind] for s in (0, 1)]
    assert all(a.end <= b.start for stage in by_stage for a, b in itertools.pairwise(stage))


def test_without_a_pipeline_they_do_not() -> None:
    """The same check of the baseline, which the serial schedule is."""
    schedule, intervals, steps = measured("serial", None)
    with pytest.raises(AssertionError, match="overlap in none of"):
        check_timetable(schedule, intervals, steps)


# Placement


def strangers(pipe: mp_lstm.Pipeline, before: set[int]) -> list[str]:
    """Arrays shaped like one stage's parameters alone that lie on another device, but for those of `before`."""
    homes: dict[tuple[int, ...], set[Any]] = defaultdict(set)
    for stage in pipe.stages:
        for leaf in jax.tree.leaves(jax.eval_shape(stage.init, jax.random.key(0))):
            homes[leaf.shape].add(pipe.plan.devices[stage.number])
    return [
        f"{array.shape} on {array.devices()}, not {homes[array.shape]}"
        for array in jax.live_arrays()
        if id(array) not in before and not array.is_deleted() and array.shape in homes
        and not array.devices() <= homes[array.shape]
    ]  # fmt: skip


# Sizes that occur once, so that an array's shape tells whose it is.
UNLIKE: dict[str, Any] = {"vocab": 37, "embed": 5, "hidden": [7, 9, 11], "layers": 3}


def test_no_device_ever_holds_another_stages_parameters(tmp_path: Any) -> None:
    """Looked for after every program, and with everything a pipeline can do; moments of Adam are parameters too."""
    devices = [jax.devices()[device] for device in (3, 1, 2)]
    model = mp_lstm.language_model(**UNLIKE)
    gc.collect()
    everything = jax.live_arrays()  # held, so that their ids stay theirs
    before = {id(array) for array in everything}
    pipe = examples.pipeline(
        model, batch_size=3, lengths=(4,), devices=devices, chunk=2, microbatches=2, optimizer=optax.adam(0.1)
    )
    looked = []

    def look(*_: Any) -> None:
        looked.append(strangers(pipe, before))

    with runs_seen(look):
        state = pipe.init(jax.random.key(0))
        look()
        batch = random_batch(np.random.default_rng(0), 4, 3, lengths=[4, 0, 2])
        pipe.value_and_grad(state, batch)
        state, _ = pipe.step(state, batch)
        state, _ = pipe.step(state, batch)
        pipe.evaluate(state, batch)
        pipe.infer(state, batch.inputs)
        params = pipe.params(state)
        look()
        checkpoint.save(tmp_path, pipe, state, Notes())
        look()
        state = pipe.load(params)
        look()
    assert len(looked) > 50
    assert [found for found in looked if found] == []
    used = {device for array in jax.live_arrays() if id(array) not in before for device in array.devices()}
    assert used <= {*devices, jax.devices()[0]}


def test_a_misplaced_parameter_is_found() -> None:
    everything = jax.live_arrays()  # of other tests too, held so that their ids stay theirs
    before = {id(array) for array in everything}
    model = mp_lstm.language_model(**UNLIKE)
    pipe = examples.pipeline(model, batch_size=3, lengths=(4,))
    params = examples.random_params(model)
    state = pipe.load(params)
    assert strangers(pipe, before) == []
    whole = jax.device_put(state.stages[0].own, pipe.plan.devices[1])
    assert len(strangers(pipe, before)) == len(jax.tree.leaves(whole))
