"""Stages on meshes: whatever part of rows and vocabulary a device has, all is as on one device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import examples
import mp_lstm
import reference
from examples import by_row, random_batch, random_carry, random_params
from mp_lstm.errors import InputError
from mp_lstm.layers import lean_head
from mp_lstm.runtime.measure import measure_steps
from mp_lstm.runtime.memory import live_bytes
from mp_lstm.runtime.placement import stage_sharding
from mp_lstm.training import checkpoint
from mp_lstm.training.notes import Notes
from reference import assert_close

Float64 = Callable[[], AbstractContextManager[None]]
KEY = 42
SIZES: dict[str, Any] = {"vocab": 12, "embed": 4, "hidden": 4, "layers": 2}
REGULARISED: dict[str, Any] = {
    "dropout": 0.3,
    "dropout_words": 0.3,
    "weight_drop": 0.3,
    "temporal_reg": 1.0,
    "activation_reg": 1.0,
}


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Heads that compute their logits again do so in more than one block here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lean_head, "BLOCK_ROWS", 3)
        yield


class Mesh(NamedTuple):
    """Stages, and how the devices of each divide its work."""

    partition: tuple[int, ...]
    data: int = 1
    model: int = 1

    def plan(self, **planned: Any) -> dict[str, Any]:
        devices = jax.devices()[: len(self.partition) * self.data * self.model]
        parts = {"data_parallel": self.data, "model_parallel": self.model}
        return {"partition": self.partition, "devices": devices, **parts, **planned}


def pipeline(model: mp_lstm.Model, mesh: Mesh, **planned: Any) -> mp_lstm.Pipeline:
    return examples.pipeline(model, **mesh.plan(**planned))


def check(mesh: Mesh, *, tie: bool, rows: int = 5, residual: bool = False, options: Any = REGULARISED, **cut: Any):
    """One step's loss, gradient, norm and carried state against the reference's."""
    options = {**options, "tie": tie, "residual_from": 1 if residual else None}
    model = mp_lstm.language_model(**SIZES, **options, dtype=jnp.float64)
    rng, key = np.random.default_rng(rows), jax.random.key(KEY)
    lengths, resets = [6, 0, 4, 5, 2, 3][:rows], (rng.random(rows) < 0.5).tolist()
    batch = random_batch(rng, 6, rows, lengths=lengths, weighted=True, resets=resets)
    params, carry, optimizer = random_params(model), random_carry(model, rows), examples.recorder()
    states = reference.lstm_states(carry)
    expected = reference.run(reference.Spec(2, **options), params, [batch], key=key, carry=states)

    pipe = pipeline(model, mesh, batch_size=rows, lengths=(6,), schedule="wavefront", optimizer=optimizer, **cut)
    state = pipe.restore(params, [optimizer.init(row) for row in params], key=key, carry=carry)
    after, metrics = pipe.step(state, batch)

    loss, gradients = expected.mean()
    assert_close(by_row([stage.optimizer for stage in after.stages]), gradients, 1e-10)
    assert_close(metrics.loss, loss, 1e-10)
    assert_close(metrics.grad_norm, optax.tree.norm(gradients), 1e-10)
    assert_close(reference.lstm_states(after.carry), expected.states[-1], 1e-10)
    assert len(pipe.programs) <= pipe.programs.bound


@pytest.mark.parametrize(
    ("mesh", "tie", "cut"),
    [
        (Mesh((2, 2), data=2), True, {"chunk": 3, "microbatches": 1}),
        (Mesh((2, 2), model=2), True, {"chunk": 4, "microbatches": 3}),
        pytest.param(
            Mesh((2, 2), model=2),
            True,
            {"chunk": 4, "microbatches": 2, "remat": "head"},
            marks=pytest.mark.slow,  # the next case runs such a head too
        ),
        (Mesh((4,), data=2, model=2), False, {"chunk": 3, "microbatches": 2, "remat": "layer"}),
    ],
    ids=["2 x data 2", "2 x model 2", "2 x model 2, lean", "1 x 2 x 2"],
)
def test_a_step_equals_the_reference(x64: None, mesh: Mesh, tie: bool, cut: dict[str, Any]) -> None:
    """Five rows: neither the micro-batches nor their parts are of one size."""
    check(mesh, tie=tie, **cut)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    data, model = draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 1), (1, 3), (4, 1), (1, 4)]))
    two = data * model * 2 <= 4 and draw(st.booleans())
    return Mesh(draw(st.sampled_from([(1, 3), (2, 2), (3, 1)])) if two else (4,), data, model)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 10)
@given(
    mesh=meshes(),
    tie=st.booleans(),
    rows=st.integers(1, 6),
    residual=st.booleans(),
    options=st.sampled_from([{}, {"dropout": 0.3}, REGULARISED, {"dropout": 0.3, "dropout_locked": True}]),
    chunk=st.integers(1, 6),
    microbatches=st.integers(1, 3),
    remat=st.sampled_from(["none", "head", "layer", "stage"]),
)
def test_any_mesh_equals_the_reference(float64: Float64, mesh: Mesh, rows: int, microbatches: int, **case: Any) -> None:
    with float64():
        check(mesh, rows=rows, microbatches=min(rows, microbatches), **case)


@pytest.mark.slow
def test_rounded_products(x64: None) -> None:
    """Each device rounds what one device rounds; what they add up is in float64."""
    model = mp_lstm.language_model(**SIZES, dropout=0.3, tie=True, products=jnp.bfloat16, dtype=jnp.float64)
    params, batch = random_params(model), random_batch(np.random.default_rng(0), 6, 4, lengths=[6, 0, 3, 5])

    def run(mesh: Mesh) -> Any:
        pipe = pipeline(model, mesh, lengths=(6,), chunk=3, microbatches=1, schedule="wavefront")
        return pipe.value_and_grad(pipe.load(params, key=jax.random.key(KEY)), batch)

    assert_close(run(Mesh((4,), data=2, model=2)), run(Mesh((4,))), 1e-10)


def losses(mesh: Mesh, steps: int) -> list[float]:
    """Of a training with Adam and clipping, dropout on."""
    model = mp_lstm.language_model(**SIZES | {"layers": sum(mesh.partition) - 2}, dropout=0.3)
    cut = {"chunk": 4, "microbatches": 1, "schedule": "wavefront", "batch_size": 5}
    pipe = pipeline(model, mesh, optimizer=optax.adam(0.02), options={"max_norm": 1.0}, **cut)
    rng, state, found = np.random.default_rng(0), pipe.init(jax.random.key(KEY)), []
    for _ in range(steps):
        state, metrics = pipe.step(state, random_batch(rng, 8, 5, lengths=rng.integers(1, 9, 5).tolist()))
        found.append(float(metrics.loss))
    return found


def test_some_steps_of_training() -> None:
    np.testing.assert_allclose(losses(Mesh((3,), model=2), 4), losses(Mesh((3,)), 4), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [Mesh((1, 1, 1, 1)), Mesh((2, 2), data=2), Mesh((2, 2), model=2), Mesh((4,), 2, 2)], ids=str
)
def test_thirty_steps_of_training(mesh: Mesh) -> None:
    np.testing.assert_allclose(losses(mesh, 30), losses(Mesh((4,)), 30), rtol=1e-5)


# What lies where


ARRAY = re.compile(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]")


def largest_array(program: str) -> int:
    """Elements of the largest array of a compiled program."""
    return max(math.prod(map(int, sizes.split(","))) for sizes in ARRAY.findall(program) or ["1"])


@pytest.mark.parametrize("remat", ["none", "head"])
def test_no_program_holds_more_than_its_part_of_the_logits(remat: str) -> None:
    """In what was compiled for one device of four there is no array above a quarter of [T, B, V], or half of a block's.

    Sixteen rows of a device are five blocks of four.
    """
    time, rows, vocab = 8, 4, 1 << 12
    model = mp_lstm.language_model(vocab=vocab, embed=4, hidden=4, layers=1, dropout=0.3)
    cut = {"batch_size": rows, "lengths": (time,), "schedule": "serial", "remat": remat}
    pipe = pipeline(model, Mesh((3,), data=2, model=2), **cut)
    batch = examples.padded(random_batch(np.random.default_rng(0), time, rows), time, rows)
    pipe.warm_up([batch])
    texts = {key.phase: program.executable.as_text() for key, program in pipe.programs._programs.items()}
    assert {"forward", "backward", "weight_gradient", "evaluate", "square_norm", "update"} <= texts.keys()
    largest = {phase: largest_array(text) for phase, text in texts.items()}
    part = time * rows * vocab // 4 if remat == "none" else 4 * vocab // 2
    assert largest["forward"] == max(largest.values()) == part
    words = ("all-gather", "all-to-all", "collective-permute")
    assert [phase for phase, text in texts.items() if any(word in text for word in words)] == []


def test_each_device_holds_its_part() -> None:
    """Of parameters, gradients and moments of the vocabulary half, of a batch its rows, of the rest all."""
    model = mp_lstm.language_model(**SIZES)
    pipe = pipeline(model, Mesh((2, 2), model=2), optimizer=optax.adam(0.1))
    state = pipe.init(jax.random.key(0))
    assert_close(pipe.params(state), model.init(jax.random.key(0)), 1e-6)
    _, gradients = pipe.value_and_grad(state, random_batch(np.random.default_rng(0), 8, 4))
    moments = [row[0].mu for row in by_row([stage.optimizer for stage in state.stages])]
    for rows in (by_row([stage.own for stage in state.stages]), moments, gradients):
        shapes = [[leaf.addressable_shards[1].data.shape for leaf in jax.tree.leaves(row)] for row in rows]
        lstm = [(4, 16), (4, 16), (16,)]
        assert shapes == [[(6, 4)], lstm, lstm, [(4, 6), (6,)]]
    pipe = pipeline(model, Mesh((2, 2), data=2))
    batch = pipe.place(random_batch(np.random.default_rng(0), 8, 4, lengths=[8, 2, 3, 4])).batches[0]
    assert batch.inputs[0][0].addressable_shards[0].data.shape[1] == batch.shape.rows // 2
    assert batch.lengths[1][0].addressable_shards[0].data.shape == (batch.shape.rows // 2,)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "head"])
def test_a_large_vocabulary_takes_little_more_than_half(remat: str) -> None:
    """With model 2 each device needs at most 0.6 of what one needs, and finds the same losses.

    No array of any program is above half of [T, B, V]; where the head computes its logits again, above half of a
    block's, which has 160 of the 320 rows.
    """
    time, rows, vocab = 16, 20, 200_000
    batch = random_batch(np.random.default_rng(0), time, rows)

    def run(parts: int) -> tuple[int, int, list[float]]:
        model = mp_lstm.language_model(vocab=vocab, embed=16, hidden=16, layers=1)
        cut = {"batch_size": rows, "lengths": (time,), "schedule": "serial", "optimizer": optax.adam(0.1)}
        pipe = pipeline(model, Mesh((3,), model=parts), remat=remat, **cut)
        state, peaks = live_bytes(pipe, pipe.init(jax.random.key(0)), batch)
        largest = max(map(largest_array, (p.executable.as_text() for p in pipe.programs._programs.values())))
        found = []
        for _ in range(3):
            state, metrics = pipe.step(state, batch)
            found.append(float(metrics.loss))
        return peaks[0], largest, found

    (peak, _, losses), (half_peak, largest, half_losses) = run(1), run(2)
    assert half_peak <= 0.6 * peak
    assert largest <= (time * rows if remat == "none" else 160) * vocab // 2
    np.testing.assert_allclose(half_losses, losses, rtol=1e-5)


# What else a pipeline does


def test_predictions_evaluation_and_no_late_compilation(x64: None) -> None:
    """Three rows, which no mesh of data 2 divides."""
    spec, key = reference.Spec(2, dropout=0.3, tie=True), jax.random.key(KEY)
    model = mp_lstm.language_model(**SIZES, dropout=0.3, tie=True, dtype=jnp.float64)
    pipe = pipeline(model, Mesh((3, 1), data=2), batch_size=3, lengths=(4,), chunk=2, microbatches=2)
    params, batch = random_params(model), random_batch(np.random.default_rng(0), 4, 3, lengths=[4, 1, 2])
    state = pipe.load(params, key=key)
    pipe.warm_up([batch])
    compiled = len(pipe.programs)
    assert_close(pipe.evaluate(state, batch).loss, reference.run(spec, params, [batch]).mean()[0], 1e-10)
    state, _ = pipe.step(state, batch)
    assert len(pipe.programs) == compiled
    logits, carry = pipe.infer(state, batch.inputs)
    assert_close(logits, reference.logits(spec, pipe.params(state), batch.inputs), 1e-10)
    again, _ = pipe.infer(state, batch.inputs, carry, resets=[True, True, True])
    assert_close(again, logits, 1e-12)


def test_a_checkpoint_moves_between_meshes(tmp_path: Path) -> None:
    model = mp_lstm.language_model(**SIZES, tie=True)
    optimizer = optax.adam(0.1)
    pipes = [pipeline(model, mesh, optimizer=optimizer) for mesh in (Mesh((2, 2), model=2), Mesh((4,)), Mesh((4,), 2))]
    state = pipes[0].init(jax.random.key(0))
    expected = pipes[0].params(state)
    for step, (pipe, other) in enumerate(zip(pipes, [*pipes[1:], pipes[0]], strict=True)):
        checkpoint.save(tmp_path / str(step), pipe, state, Notes())
        state, _ = checkpoint.restore(other, tmp_path / str(step))
        assert jax.tree.map(lambda leaf: leaf.sharding, state.stages) == jax.tree.map(
            lambda leaf: leaf.sharding, other.abstract_state().stages
        )
        assert_close(other.params(state), expected, 0)


def test_a_state_of_another_mesh_is_refused() -> None:
    """The same devices: only their arrangement tells."""
    model = mp_lstm.language_model(**SIZES)
    state = pipeline(model, Mesh((4,), data=2)).init(jax.random.key(0))
    other = pipeline(model, Mesh((4,), model=2))
    with pytest.raises(InputError, match=r"has stage 0 on .*'data': 2, .* the pipeline on .*'model': 2.*: pass"):
        other.params(state)


def test_a_vocabulary_that_cannot_be_divided() -> None:
    model = mp_lstm.language_model(vocab=11, embed=3, hidden=4, layers=1)
    with pytest.raises(InputError, match=r"embed: model_parallel is 2, which .* vocabulary of 11: make it 10 or 12 \("):
        pipeline(model, Mesh((3,), model=2))


def test_refuses_what_is_no_device_in_a_group() -> None:
    with pytest.raises(InputError, match="a stage's device is 'cpu:1', one of JAX's is wanted"):
        stage_sharding(mp_lstm.planning.Group((jax.devices()[0], "cpu:1"), 2, 1))


@pytest.mark.slow
def test_a_step_is_measured_and_verified() -> None:
    model = mp_lstm.language_model(**SIZES, dropout=0.3)
    pipe = pipeline(model, Mesh((2, 2), data=2), chunk=4, microbatches=1)
    state, batch = pipe.init(jax.random.key(0)), random_batch(np.random.default_rng(0), 8, 4)
    assert pipe.verify(state, batch).passed
    state, _ = pipe.step(state, batch)
    _, measured = measure_steps(pipe, state, [batch, batch])
    assert [step.start.keys() for step in measured.steps] == [set(pipe.plan.schedule((8,)).tasks)] * 2


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_carried_state_goes_on_where_rows_are_divided(x64: None, microbatches: int) -> None:
    """With one micro-batch the state of the first step stayed divided: the second step ended in an error of JAX's."""
    model = mp_lstm.language_model(**SIZES, dtype=jnp.float64)
    batch = random_batch(np.random.default_rng(0), 6, 4, resets=[False, True, False, False])
    found = []
    for mesh in (Mesh((4,), data=2), Mesh((4,))):
        pipe = pipeline(model, mesh, batch_size=4, lengths=(6,), microbatches=microbatches)
        state = pipe.load(random_params(model))
        for _ in range(3):
            state, _ = pipe.step(state, batch)
        found.append((pipe.params(state), reference.lstm_states(state.carry)))
    assert_close(*found, 1e-10)
