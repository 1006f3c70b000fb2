"""What a step really holds on each device, and the arrays of a row told apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import examples
import mp_lstm
from mp_lstm.layers.remat import REMAT
from mp_lstm.runtime.memory import RowArrays, live_bytes, nbytes, row_arrays
from mp_lstm.runtime.placement import put, stage_sharding
from mp_lstm.runtime.programs import Program
from reference import assert_close

TIME, ROWS = 8, 4


def two_stages(**options: Any) -> tuple[mp_lstm.Pipeline, mp_lstm.State, mp_lstm.Batch]:
    cut = {"partition": (2, 2), "schedule": "wavefront", "chunk": 4, "microbatches": 1}
    pipe = examples.pipeline(mp_lstm.language_model(**examples.SIZES), optimizer=optax.adam(0.1), **cut, **options)
    batch = examples.random_batch(np.random.default_rng(0), time=TIME, rows=ROWS)
    return pipe, pipe.init(jax.random.key(0)), batch


def test_arrays_are_told_apart_by_who_makes_and_who_reads_them() -> None:
    """Programs on vectors of different sizes, so that each sum of bytes says which of them are in it."""
    sharding = stage_sharding(jax.devices()[0])

    def of(size: int) -> jax.Array:
        return put(np.ones(size, np.float32), sharding)

    def forward(own: Any, lent: Any, x: Any, state: Any, unit: Any, total: Any) -> Any:
        del lent, total
        wide = jnp.concatenate([x, x])  # 2 x
        y = 2 * x
        return state + 1, y, {"own": own, "x": x, "state": state, "unit": unit, "y": y, "again": y, "wide": wide}

    def backward(own: Any, lent: Any, saved: Any, dy: Any, dstate: Any, unit: Any, summed: Any) -> Any:
        del lent, unit, summed
        new = jnp.concatenate([dy, saved["wide"]])  # 3 x
        return dy, dstate, {"x": saved["x"], "y": saved["y"], "new": new, "same": new, "dy": dy}, own * 2

    args = (of(100), (), of(10), of(1), of(1000), None)
    first = Program("forward", forward, args)
    saved = first(*args)[2]
    more = (args[0], (), saved, of(10), args[3], args[4], None)
    found = row_arrays(first, Program("backward", backward, more), args, more)
    words = {"saved": 20 + 1, "kept": 10, "tape": 30 + 10, "input": 10, "output": 10, "summed": 100}
    assert found == RowArrays(**{name: 4 * count for name, count in words.items()}, keeps_y=True)


def test_a_row_that_keeps_no_y() -> None:
    sharding = stage_sharding(jax.devices()[0])
    x = put(np.ones(10, np.float32), sharding)

    def forward(own: Any, lent: Any, x: Any, state: Any, unit: Any, total: Any) -> Any:
        return state, x + 1, (x,)

    def backward(own: Any, lent: Any, saved: Any, dy: Any, dstate: Any, unit: Any, summed: Any) -> Any:
        return dy * 2, dstate, saved, None

    args, more = ((), (), x, (), (), None), ((), (), (x,), x, (), (), None)
    found = row_arrays(Program("forward", forward, args), Program("backward", backward, more), args, more)
    assert found == RowArrays(saved=0, kept=0, tape=0, input=40, output=40, summed=0, keeps_y=False)


def test_a_watched_step_is_a_step() -> None:
    pipe, state, batch = two_stages(options={"donate": False})
    after, peaks = live_bytes(pipe, state, batch)
    expected, _ = pipe.step(state, batch)
    assert_close(pipe.params(after), pipe.params(expected), 0.0)
    assert after.step == 1
    assert set(peaks) == {0, 1}


def test_a_device_holds_what_its_stage_needs() -> None:
    """Parameters, gradients and Adam's moments, and at the end of the forwards all that F has saved."""
    pipe, state, batch = two_stages()
    fixed = [2 * nbytes(held.own) + nbytes(held.optimizer) for held in state.stages]
    _, peaks = live_bytes(pipe, state, batch)
    forwards = {key.stage: program for key, program in pipe.programs[TIME].items() if key.phase == "forward"}
    for stage in (0, 1):
        saved = nbytes(forwards[stage].results()[2]) - nbytes(pipe.abstract_state().stages[stage].own)
        assert peaks[stage] > max(fixed[stage], fixed[stage] // 2 + 2 * saved)


def test_what_others_hold_does_not_count() -> None:
    pipe, state, batch = two_stages(options={"donate": False})
    live_bytes(pipe, state, batch)  # makes the constants
    _, peaks = live_bytes(pipe, state, batch)
    strangers = [put(np.ones(1 << 20, np.float32), stage_sharding(device)) for device in jax.devices()[:2]]
    assert live_bytes(pipe, state, batch)[1] == peaks
    assert all(array.nbytes == 4 << 20 for array in strangers)


def test_temporaries_count_on_the_device_that_runs_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, state, batch = two_stages(options={"donate": False})
    live_bytes(pipe, state, batch)

    def peaks_if(stage: int | None) -> dict[int, int]:
        def memory(program: Program) -> Any:
            large = stage is not None and program.name == f"stage{stage}_backward"
            return SimpleNamespace(temp_size_in_bytes=1 << 30 if large else 0)

        monkeypatch.setattr(Program, "memory", memory)
        return live_bytes(pipe, state, batch)[1]

    without = peaks_if(None)
    for stage in (0, 1):
        with_large = peaks_if(stage)
        assert with_large[stage] > 1 << 30
        assert with_large[1 - stage] == without[1 - stage]


@pytest.mark.slow
def test_stages_on_one_device_are_one_sum() -> None:
    """An array that is only handed to the other stage is there once."""
    apart, state, batch = two_stages(options={"donate": False})
    live_bytes(apart, state, batch)
    together, same, _ = two_stages(options={"donate": False}, devices=[jax.devices()[0]] * 2)
    live_bytes(together, same, batch)
    two, one = live_bytes(apart, state, batch)[1], live_bytes(together, same, batch)[1]
    assert set(one) == {0}
    assert max(two.values()) < one[0] < sum(two.values())


def test_less_is_held_where_backwards_come_early() -> None:
    """Of four micro-batches GPipe saves all on every stage, 1F1B one on the last."""
    model = mp_lstm.language_model(vocab=examples.VOCAB, embed=32, hidden=32, layers=4)
    batch = examples.random_batch(np.random.default_rng(0), time=16, rows=16)

    def peaks(schedule: str) -> dict[int, int]:
        cut = {"schedule": schedule, "microbatches": 4, "chunk": 16, "partition": (3, 3)}
        pipe = examples.pipeline(model, batch_size=16, lengths=(16,), **cut)
        return live_bytes(pipe, pipe.init(jax.random.key(0)), batch)[1]

    unit = 2 * 16 * 4 * 6 * 32 * 4  # two LSTM layers; T, B, values of a step, H, bytes
    held = [peaks(schedule)[1] for schedule in ("gpipe", "one_f_one_b")]
    assert held[0] - held[1] > 2 * unit


@pytest.mark.slow
def test_peaks_are_predicted_from_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 10% on both stages, of rows that are compiled alone and not timed."""
    monkeypatch.setattr("mp_lstm.runtime.costs._seconds", lambda series, repeats: 0.0)
    model, optimizer = mp_lstm.language_model(vocab=examples.VOCAB, embed=64, hidden=64, layers=3), optax.sgd(0.1)
    measured: dict[str, Any] = {"optimizer": optimizer, "repeats": 1, "remat": None}
    costs = mp_lstm.measure_costs(model, 64, (8,), jax.devices()[:1], microbatches=(4,), **measured)
    batch = examples.random_batch(np.random.default_rng(0), time=8, rows=64)
    for schedule in ("gpipe", "one_f_one_b"):
        for remat in REMAT:
            options = {"schedule": schedule, "microbatches": 4, "chunk": 8, "partition": (3, 2), "remat": remat}
            pipe = examples.pipeline(model, batch_size=64, optimizer=optimizer, **options)
            _, held = live_bytes(pipe, pipe.init(jax.random.key(0)), batch)
            predicted = mp_lstm.predicted_memory(pipe.plan, model, costs)
            ratios = {device: predicted[device] / held[device] for device in held}
            assert ratios == pytest.approx(dict.fromkeys(held, 1), 0.1), (schedule, remat)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_large_vocabulary_is_predicted(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by what layers state: what a head needs that computes its logits again is one block of them."""
    monkeypatch.setattr("mp_lstm.runtime.costs._seconds", lambda series, repeats: 0.0)
    model, optimizer, rows = mp_lstm.language_model(vocab=4000, embed=8, hidden=8, layers=1), optax.adam(0.1), 80
    measured: dict[str, Any] = {"optimizer": optimizer, "repeats": 1, "remat": "head", "microbatches": (microbatches,)}
    costs = mp_lstm.measure_costs(model, rows, (8,), jax.devices()[:1], **measured)
    batch = examples.random_batch(np.random.default_rng(0), time=8, rows=rows)
    peaks = {}
    for remat in ("none", "head"):
        cut = {"schedule": "gpipe", "microbatches": microbatches, "chunk": 8, "partition": (3,), "remat": remat}
        pipe = examples.pipeline(model, batch_size=rows, devices=jax.devices()[:1], optimizer=optimizer, **cut)
        _, held = live_bytes(pipe, pipe.init(jax.random.key(0)), batch)
        peaks[remat] = held[0]
        for model_of in (costs, mp_lstm.default_calibration().costs(model)):
            predicted = mp_lstm.predicted_memory(pipe.plan, model, model_of)[0]
            assert predicted == pytest.approx(held[0], 0.1), (remat, model_of.label)
    assert peaks["head"] < 0.8 * peaks["none"]
