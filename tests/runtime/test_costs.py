"""Measured costs: what is measured and how often, what it says of memory, and that an interruption loses nothing.

No test here looks at how long anything took.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.planning.costs import CostModel, RowMemory
from mp_lstm.planning.measured import MeasuredCosts
from mp_lstm.runtime import costs as costs_module
from mp_lstm.runtime import single
from mp_lstm.runtime.costs import measure_costs
from mp_lstm.runtime.programs import Program

BATCH, SIZE, VOCAB = 4, 8, 11
FLOAT = 4  # bytes


def language_model(**changed: Any) -> mp_lstm.Model:
    options: dict[str, Any] = {"vocab": VOCAB, "embed": SIZE, "hidden": SIZE, "layers": 3} | changed
    return mp_lstm.language_model(**options)


def dense_model(hidden: int = 5) -> tuple[mp_lstm.Model, mp_lstm.Batch]:
    """Two rows that compile fast, and an example of a batch."""
    layers = [mp_lstm.dense(3, hidden), mp_lstm.dense(hidden, 2)]
    example = mp_lstm.Batch(np.zeros((6, 2, 3), np.float32), np.zeros((6, 2, 2), np.float32))
    return mp_lstm.sequential(layers, loss=mp_lstm.squared_error), example


def measure(model: mp_lstm.Model, devices: Any, **options: Any) -> MeasuredCosts:
    arguments: dict[str, Any] = {"microbatches": (1,), "repeats": 1} | options
    return measure_costs(model, BATCH, (8,), devices, **arguments)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the programs compiled so far."""
    names: list[str] = []

    def counted(name: str, *args: Any) -> Program:
        names.append(name)
        return Program(name, *args)

    monkeypatch.setattr(costs_module, "Program", counted)
    return names


@pytest.fixture(scope="module")
def measured() -> MeasuredCosts:
    """Of a language model, whole batches and halves of them."""
    return measure(language_model(), jax.devices()[:1], microbatches=(1, 2), optimizer=optax.sgd(0.1, momentum=0.9))


@pytest.mark.slow
def test_every_task_has_a_time() -> None:
    model, example = dense_model()
    first, second = devices = jax.devices()[:2]
    measured = measure(model, devices, example=example)
    assert isinstance(measured, CostModel)
    assert measured.label == f"measured on 2 x cpu, jax {jax.__version__}"
    for device in devices:
        for row in range(2):
            for kind in ("F", "B", "W", "U"):
                alone, shared = measured.seconds(kind, row, BATCH, 8, device)
                assert 0 <= alone <= shared < 10
        assert measured.overhead(device) > 0
        assert measured.capacity(device) is None
    # Emulated devices share the cores of their process.
    assert measured.host(first) == measured.host(second)
    assert measured.transfer(1 << 20, first, second) > 0
    assert measured.transfer(1 << 20, first, first) == 0


def test_equal_rows_are_measured_once(measured: Any) -> None:
    embed, *lstms, head = [row.like for row in measured.rows]
    assert len({embed, head, *lstms}) == 3
    assert len(set(lstms)) == 1


@pytest.mark.slow
def test_rows_that_differ_in_anything_but_their_place_are_told_apart() -> None:
    """Sizes, dropout, a residual connection, a tie; and the last LSTM has a dropout more."""

    def likes(**changed: Any) -> list[str]:
        rows = single.isolate(language_model(**changed), BATCH, optax.sgd(0.1), single.tokens(), jax.devices()[0])
        return [single.signature(row, BATCH) for row in rows]

    plain = likes()
    assert likes() == plain
    assert likes(layers=5)[1:] == [plain[1]] * 5 + [plain[-1]]
    assert not set(likes(dropout=0.5)[1:4]) & set(plain)
    assert len(set(likes(dropout=0.5))) == 4
    assert likes(residual_from=2)[1] == plain[1] != likes(residual_from=2)[2]
    assert likes(tie=True)[-1] != plain[-1]
    assert likes(hidden=(SIZE, SIZE, 2 * SIZE))[:3] == plain[:3]


def test_bytes_of_an_lstm(measured: Any) -> None:
    """Four gates and c are read by B last, y and x by W; z of the gates is the tape.

    States are [B, H], one a chunk, as is the sum of z: four states.
    """
    rows, time = BATCH, 8
    values, state = rows * time * SIZE * FLOAT, rows * SIZE * FLOAT
    parameters = (2 * SIZE + 1) * 4 * SIZE * FLOAT
    row = measured.memory(2, rows, time)
    assert row.parameters == row.state == parameters  # momentum keeps one value a parameter
    assert row.saved == 5 * values + 2 * state
    assert (row.kept, row.input, row.output) == (values, values, values)
    assert row.tape == 4 * values + 5 * state
    assert min(row.scratch_forward, row.scratch_backward, row.scratch_weight) >= 0


def test_bytes_of_a_head_and_an_embedding(measured: Any) -> None:
    rows, time = BATCH, 8
    steps = rows * time * FLOAT
    embed, head = measured.memory(0, rows, time), measured.memory(4, rows, time)
    # B of the embedding hands its dy to W as it is, and nobody else would hold that any longer.
    assert (embed.saved, embed.kept, embed.tape, embed.input, embed.output) == (0, 0, SIZE * steps, steps, SIZE * steps)
    # F saves x, errors and scale; the tape holds x and the scale anew, and the very errors.
    assert (head.saved, head.kept, head.input) == (steps, VOCAB * steps, SIZE * steps)
    assert head.tape == (SIZE + 1) * steps
    assert head.output == FLOAT


def test_a_head_is_measured_in_its_lean_variant_too(measured: Any) -> None:
    """Where a plan is to run it: nothing in it is as large as the logits of all steps, but those of one block."""
    layers = [mp_lstm.embedding(VOCAB, SIZE), mp_lstm.softmax_head(SIZE, VOCAB)]
    model, device = mp_lstm.sequential(layers), jax.devices()[0]
    costs = measure(model, [device], remat="head")
    lean = costs.lean()
    assert lean.lean_rows == {1}
    assert costs.memory(1, BATCH, 8).kept == (VOCAB + SIZE) * BATCH * 8 * FLOAT  # errors, and x
    assert lean.memory(0, BATCH, 8) == costs.memory(0, BATCH, 8)
    head, steps = lean.memory(1, BATCH, 8), BATCH * 8 * FLOAT
    # F saves x, dx, scale, and the maximum and the sum of the softmax; the tape holds the scale anew. No y is kept.
    assert (head.saved, head.kept, head.tape, head.input) == ((SIZE + 1) * steps, (SIZE + 2) * steps, steps, 0)
    assert min(head.scratch_forward, head.scratch_weight) >= VOCAB * steps
    with pytest.raises(InputError, match="the head as every remat but 'none' runs it was not measured"):
        measured.lean()


def test_an_input_that_the_row_below_does_not_keep(measured: Any) -> None:
    """The embedding keeps no y, which is the first LSTM's x: that is held wherever the stage begins."""
    first, second = measured.memory(1, BATCH, 8), measured.memory(2, BATCH, 8)
    assert first == second._replace(kept=second.kept + second.input, input=0)


def test_memory_between_points_is_that_of_the_programs(measured: Any) -> None:
    """Half the rows, half the time: bytes of arrays are lines."""
    half, whole = measured.memory(2, BATCH // 2, 4), measured.memory(2, BATCH, 4)
    assert (half.kept, half.saved, half.input) == (whole.kept // 2, whole.saved // 2, whole.input // 2)


PROGRAMS = 2 * (1 + 2 * 3) + 1  # two rows, each with an update and two lengths of F, B and W; and the empty program


def test_a_second_measurement_comes_from_the_cache(tmp_path: Path, compiled: list[str]) -> None:
    model, example = dense_model()
    seen: list[tuple[int, int]] = []
    options: dict[str, Any] = {"example": example, "cache_dir": tmp_path}
    first = measure(model, jax.devices()[:1], **options, progress=lambda *args: seen.append(args))
    assert seen == [(i + 1, 7) for i in range(7)]
    assert first.lean() is first  # no row has a lean variant
    assert len(compiled) == PROGRAMS
    assert measure(model, jax.devices()[:1], **options) == first
    assert len(compiled) == PROGRAMS


@pytest.mark.slow
def test_what_a_point_depends_on(tmp_path: Path, compiled: list[str]) -> None:
    """Sizes, the devices that are busy together, the optimizer, the lengths: what differs is measured anew."""
    model, example = dense_model()
    options: dict[str, Any] = {"example": example, "cache_dir": tmp_path}
    measure(model, jax.devices()[:1], **options)

    def compiled_for(model: mp_lstm.Model, devices: int, **changed: Any) -> list[str]:
        before = len(compiled)
        measure(model, jax.devices()[:devices], **options | changed)
        return compiled[before:]

    assert compiled_for(model, 1) == []
    assert compiled_for(model, 1, optimizer=optax.sgd(0.1)) == ["stage0_update"] * 2
    assert len(compiled_for(dense_model(hidden=4)[0], 1)) == PROGRAMS - 1
    assert len(compiled_for(model, 2)) == 2 * (PROGRAMS - 1) + 1
    batch = example._replace(lengths=np.array([6, 3], np.int32))  # programs that mask
    assert len(compiled_for(model, 1, example=batch)) >= 2 * 3


def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path: Path, compiled: list[str]) -> None:
    model, example = dense_model()

    def interrupt(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, jax.devices()[:1], example=example, cache_dir=tmp_path, progress=interrupt)
    assert len(list(tmp_path.iterdir())) == 4
    assert 0 < len(compiled) < PROGRAMS
    measure(model, jax.devices()[:1], example=example, cache_dir=tmp_path)
    assert len(compiled) == PROGRAMS


@pytest.mark.slow
def test_a_users_own_layers_and_features() -> None:
    """Inputs as in an example batch; a layer whose tape is summed, one that cannot be cut, a tied head elsewhere."""
    own = mp_lstm.from_function(
        lambda key: jnp.ones((3, 5)), lambda params, x, state: (state, x @ params), chunkable=False, name="own"
    )
    model = mp_lstm.sequential([own, mp_lstm.dropout(0.5), mp_lstm.dense(5, 2)], loss=mp_lstm.squared_error)
    example = mp_lstm.Batch(np.zeros((6, 2, 3), np.float32), np.zeros((6, 2, 2), np.float32))
    costs = measure(model, jax.devices()[:1], example=example)
    row = costs.memory(0, BATCH, 8)
    assert (row.parameters, row.input) == (3 * 5 * FLOAT, BATCH * 8 * 3 * FLOAT)
    assert row.tape == 0  # its gradient is there once a micro-batch, while it is worked on
    assert row.scratch_weight >= row.parameters

    tied = measure(language_model(layers=1, tie=True), jax.devices()[:1])
    assert tied.memory(2, BATCH, 8).parameters == VOCAB * FLOAT


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"devices": []}, "devices is empty, wanted those to plan for"),
        ({"lengths": ()}, "lengths is empty"),
        ({"microbatches": ()}, "microbatches is empty"),
        ({"lengths": (8, 0)}, "lengths has 0, wanted a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size has 2.5"),
        ({"repeats": 0}, "repeats has 0"),
        ({"remat": "all"}, "remat is 'all', wanted one of 'none', 'head', 'layer', 'stage', or None: pass that of the"),
        ({"microbatches": (1, 5)}, "microbatches has 5, the batch has 4 rows: pass at most those"),
    ],
)
def test_arguments_out_of_range(changed: dict[str, Any], message: str) -> None:
    arguments = {"batch_size": BATCH, "lengths": (8,), "devices": jax.devices()[:1]} | changed
    with pytest.raises(InputError, match=message):
        measure_costs(language_model(), **arguments)


def test_a_memory_has_eleven_numbers() -> None:
    """What a point on disk holds is positional: a field more would shift them."""
    assert RowMemory._fields[3:] == (
        "saved",
        "kept",
        "tape",
        "input",
        "output",
        "scratch_forward",
        "scratch_backward",
        "scratch_weight",
    )
