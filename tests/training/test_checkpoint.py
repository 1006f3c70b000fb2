"""Checkpoints: what is saved comes back, on any partition; what is broken or foreign does not.

Over 400 lines: every way to damage a checkpoint is held against the same saved ones.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.runtime import Pipeline, State
from mp_lstm.training import checkpoint
from mp_lstm.training.about import ABOUT, FIELDS
from mp_lstm.training.metrics import Sums, counted_compilations
from mp_lstm.training.notes import LastStep, Notes, Validation

Placed = Callable[..., Pipeline]

NOTES = Notes(
    position=(1, 7),
    sums=Sums(12.5, 6.0, 6, 0.25),
    last=LastStep(9, 2, 0.1 + 0.2, 1e-3),
    valid=Validation(9, 2.5, 12.18, 57),
    best=Validation(2, 2.25, 9.49, 57),  # of the state that these tests save
    plateau=2.25,
    metrics_size=1234,
    seconds=3.5,
)


@pytest.fixture(scope="module")
def placed(devices: list[jax.Device]) -> Placed:
    """Makes pipelines of one model, of which no two rows have arrays of the same shape."""

    def make(partition=(2, 2), on=(0, 1), *, hidden=(7, 11), optimizer=None, vocab=13) -> Pipeline:
        model = mp_lstm.language_model(vocab=vocab, embed=11, hidden=hidden, layers=len(hidden), tie=True)
        plan = mp_lstm.make_plan(
            model, batch_size=3, lengths=(4,), devices=[devices[i] for i in on], partition=partition
        )
        return mp_lstm.make_pipeline(model, plan, optimizer or optax.adam(0.01))

    return make


def text(resets: bool) -> mp_lstm.Batch:
    """A batch of rows that go on from the one before, unless they are reset."""
    tokens = np.random.default_rng(0).integers(0, 13, (5, 3)).astype(np.int32)
    return mp_lstm.Batch(tokens[:-1], tokens[1:], resets=np.full(3, resets))


@pytest.fixture(scope="module")
def trained(placed: Placed) -> tuple[Pipeline, State]:
    """A state with everything in it: moments, carried state, counts, a lowered rate."""
    pipe = placed()
    state = pipe.init(jax.random.key(5))
    for resets in (True, False):
        state, _ = pipe.step(state, text(resets))
    return pipe, state.replace(rate=0.25)


def rows(state: State) -> dict[str, list]:
    """Host copies of what a state holds for each row."""
    parts = {
        "params": [row for stage in state.stages for row in stage.own],
        "optimizer": [row for stage in state.stages for row in stage.optimizer],
        "carry": [row for stage in state.carry or () for row in stage],
    }
    return jax.tree.map(np.array, parts)


def assert_same(got: State, want: State) -> None:
    jax.tree.map(np.testing.assert_array_equal, rows(got), rows(want))
    np.testing.assert_array_equal(jax.random.key_data(got.key), jax.random.key_data(want.key))
    assert (got.step, got.batches, got.rate) == (want.step, want.batches, want.rate)


@pytest.mark.parametrize(
    ("partition", "on"),
    [((2, 2), (0, 1)), ((2, 2), (1, 0)), ((4,), (3,)), ((1, 1, 2), (2, 3, 0)), ((1, 2, 1), (1, 0, 1))],
)
def test_a_state_comes_back_bit_for_bit_on_any_partition_and_devices(
    placed: Placed, trained, tmp_path: Path, partition: tuple[int, ...], on: tuple[int, ...]
) -> None:
    pipe, state = trained
    checkpoint.save(tmp_path, pipe, state, NOTES)
    other = placed(partition, on)
    restored, notes = checkpoint.restore(other, tmp_path)
    assert_same(restored, state)
    assert notes == NOTES
    for stage, held, carried in zip(other.stages, restored.stages, restored.carry or (), strict=True):
        leaves = jax.tree.leaves((held, carried))
        assert all(leaf.committed and leaf.sharding == stage.sharding for leaf in leaves)


def test_restoring_compiles_nothing(trained, tmp_path: Path) -> None:
    """A run whose best validation was not the last restored it for the test, and compiled the key's conversion.

    A test of whole runs had missed that, as others in its process had restored before it: the caches are cleared here.
    """
    pipe, state = trained
    checkpoint.save(tmp_path, pipe, state, NOTES)
    jax.clear_caches()
    pipe.init(jax.random.key(5))  # as every run begins
    with counted_compilations() as compiled:
        checkpoint.restore(pipe, tmp_path)
        assert compiled() == 0


def test_a_restored_state_goes_on_as_the_saved_one(trained, tmp_path: Path) -> None:
    """The tied decoder's copy of the table too, on the other stage."""
    pipe, state = trained
    checkpoint.save(tmp_path, pipe, state, NOTES)
    losses = []
    for _ in range(2):
        again, _ = checkpoint.restore(pipe, tmp_path)
        again, metrics = pipe.step(again, text(False))
        losses.append(float(metrics.loss))
        again, metrics = pipe.step(again, text(False))
        losses.append(float(metrics.loss))
    assert losses[:2] == losses[2:]
    assert float(pipe.evaluate(state, text(False), carry=state.carry).loss) == pytest.approx(losses[0], rel=1e-6)


def test_a_state_that_carries_nothing_yet(placed: Placed, tmp_path: Path) -> None:
    pipe = placed(optimizer=optax.sgd(0.1))  # nor has its optimizer a state
    state = pipe.init(jax.random.key(1))
    checkpoint.save(tmp_path, pipe, state, Notes())
    restored, notes = checkpoint.restore(pipe, tmp_path)
    assert restored.carry is None
    assert notes == Notes()
    assert_same(restored, state)


def test_the_key_keeps_its_kind(placed: Placed, tmp_path: Path) -> None:
    pipe = placed()
    state = pipe.init(jax.random.key(1, impl="rbg"))
    checkpoint.save(tmp_path, pipe, state, Notes())
    restored, _ = checkpoint.restore(pipe, tmp_path)
    assert jax.random.key_impl(restored.key) == jax.random.key_impl(state.key)


def test_no_device_ever_holds_parameters_of_another_stage(placed: Placed, trained, tmp_path: Path) -> None:
    """A thread looks at all live arrays while the state is saved, and while it is restored to other devices."""
    pipe, state = trained
    own = {
        stage.sharding: {leaf.shape for row in held.own[-1:] for leaf in jax.tree.leaves(row)}
        for stage, held in zip(pipe.stages, state.stages, strict=True)
    }
    assert not set.intersection(*own.values()), "the stages' arrays must be told apart by their shapes"
    other = placed((2, 2), (2, 3))
    homes = [
        (pipe.stages, own),
        (other.stages, dict(zip([s.sharding for s in other.stages], own.values(), strict=True))),
    ]
    allowed = {}
    for stages, shapes in homes:
        for stage in stages:
            for shape in shapes[stage.sharding]:
                allowed.setdefault(shape, set()).update(stage.sharding.device_set)
    before = {id(array) for array in jax.live_arrays()}
    strangers, looks, done = [], 0, threading.Event()

    def look() -> None:
        nonlocal looks
        for array in jax.live_arrays():
            if id(array) not in before and array.shape in allowed and not array.is_deleted():
                strangers.extend(device for device in array.devices() if device not in allowed[array.shape])
        looks += 1

    def watch() -> None:
        while not done.is_set():
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        checkpoint.save(tmp_path, pipe, state, NOTES)
        restored, _ = checkpoint.restore(other, tmp_path)
    finally:
        done.set()
        watcher.join()
    look()
    assert looks > 10
    assert strangers == []
    assert restored.step == state.step


KILLED = """
import sys, jax, optax, mp_lstm
from mp_lstm.training import checkpoint
from mp_lstm.training.notes import Notes
model = mp_lstm.language_model(vocab=20_000, embed=300, hidden=8, layers=1)
plan = mp_lstm.make_plan(model, batch_size=1, lengths=(1,), devices=jax.devices()[:1])
pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
state = pipe.init(jax.random.key(0))
for step in range(1, 10_000):
    checkpoint.save(sys.argv[1], pipe, state.replace(step=step), Notes(seconds=float(step)))
    print(step, flush=True)
"""


def test_a_process_killed_while_it_writes_costs_no_earlier_checkpoint(devices, tmp_path: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        while not list((tmp_path / "checkpoints").glob("*tmp*")):
            time.sleep(0.001)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    unfinished = list((tmp_path / "checkpoints").glob("*tmp*"))
    assert unfinished, "it was killed between two writes: this test shows nothing"
    last = checkpoint.latest(tmp_path)
    assert last is not None
    model = mp_lstm.language_model(vocab=20_000, embed=300, hidden=8, layers=1)
    plan = mp_lstm.make_plan(model, batch_size=1, lengths=(1,), devices=devices[2:3])
    pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1))
    state, notes = checkpoint.restore(pipe, tmp_path)
    assert (state.step, notes.seconds) == (last, float(last))
    jax.tree.map(np.testing.assert_array_equal, pipe.params(state), pipe.params(pipe.init(jax.random.key(0))))
    checkpoint.save(tmp_path, pipe, state.replace(step=last + 5), Notes())
    assert checkpoint.latest(tmp_path) == last + 5
    assert not list((tmp_path / "checkpoints").glob("*tmp*")), "what the killed process left is swept up"


def test_the_last_two_and_the_best_are_kept(trained, tmp_path: Path) -> None:
    pipe, state = trained
    for step in range(1, 7):
        best = Validation(min(step, 2), 2.0, 7.4, 57)
        checkpoint.save(tmp_path, pipe, state.replace(step=step), NOTES._replace(best=best))
    assert checkpoint.steps(tmp_path) == [2, 5, 6]
    assert (checkpoint.latest(tmp_path), checkpoint.best(tmp_path)) == (6, 2)
    assert checkpoint.restore(pipe, tmp_path, 2).state.step == 2


def test_the_last_is_the_best_where_nothing_was_validated(trained, tmp_path: Path) -> None:
    pipe, state = trained
    assert checkpoint.best(tmp_path) is checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, pipe, state, Notes())
    assert checkpoint.best(tmp_path) == state.step


def test_saving_a_step_again_replaces_its_notes(trained, tmp_path: Path) -> None:
    """A step that was saved before it was validated: the best parameters stayed those of an earlier step."""
    pipe, state = trained
    checkpoint.save(tmp_path, pipe, state.replace(step=1), NOTES._replace(best=Validation(1, 3.0, 20.1, 57)))
    checkpoint.save(tmp_path, pipe, state, NOTES._replace(best=Validation(1, 3.0, 20.1, 57)))
    assert checkpoint.best(tmp_path) == 1
    checkpoint.save(tmp_path, pipe, state, NOTES)
    assert checkpoint.best(tmp_path) == 2
    restored, notes = checkpoint.restore(pipe, tmp_path)
    assert notes == NOTES
    assert_same(restored, state)
    assert not list(tmp_path.rglob("*.new"))


def test_a_best_checkpoint_that_is_gone_is_none(trained, tmp_path: Path) -> None:
    """A run that went on would look for it at its very end."""
    pipe, state = trained
    best = NOTES._replace(best=Validation(1, 2.0, 7.4, 57))
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, pipe, state.replace(step=step), best)
    shutil.rmtree(tmp_path / "checkpoints" / "1")
    assert checkpoint.best(tmp_path) == 3
    assert checkpoint.restore(pipe, tmp_path).notes.best is None


DAMAGES: dict[str, Callable[[Path], object]] = {
    "nothing in it": lambda step: [shutil.rmtree(part) if part.is_dir() else part.unlink() for part in step.iterdir()],
    "no about": lambda step: shutil.rmtree(step / "about"),
    "no about/metadata": lambda step: (step / "about" / "metadata").unlink(),
    "about/metadata cut": lambda step: cut(step / "about" / "metadata"),
    "about/metadata of another kind": lambda step: (step / "about" / "metadata").write_text("[1]"),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "state/d cut": lambda step: [cut(file) for file in (step / "state" / "d").iterdir()],
    "state/d empty": lambda step: [file.write_bytes(b"") for file in (step / "state" / "d").iterdir()],
    "state/d swapped for a directory": lambda step: [
        (file.unlink(), file.mkdir()) for file in (step / "state" / "d").iterdir()
    ],
    "state/_METADATA cut": lambda step: cut(step / "state" / "_METADATA"),
    "no manifest": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_those_that_are_whole(trained, tmp_path: Path, damage: str) -> None:
    pipe, state = trained
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, pipe, state.replace(step=step), NOTES._replace(best=Validation(1, 2.0, 7.4, 57)))
    DAMAGES[damage](tmp_path / "checkpoints" / "3")
    message = r"checkpoints/3 is damaged \(.+\): delete or move it, to use step 2 instead \(whole: 1, 2\)$"
    with pytest.raises(InputError, match=message):
        checkpoint.restore(pipe, tmp_path)
    if "about" in damage:  # which also tells what is best
        with pytest.raises(InputError, match=message):
            checkpoint.best(tmp_path)
    cut(tmp_path / "checkpoints" / "2" / "about" / "metadata")
    with pytest.raises(InputError, match=r"checkpoints/3 is damaged .* step 1 instead \(whole: 1\)$"):
        checkpoint.restore(pipe, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "1")
    with pytest.raises(InputError, match=r"no other one is whole, so train anew, with another --run-dir$"):
        checkpoint.restore(pipe, tmp_path)


def about(step: Path, changes: Callable[[dict], object], *, sealed: bool = False) -> None:
    """Changes what a checkpoint tells of itself; unless it is sealed, as one tells that was saved without digests."""
    told = json.loads((step / ABOUT).read_text())
    if not sealed:
        del told["digest"], told["digests"]
    changes(told)
    (step / ABOUT).write_text(json.dumps(told))


def saved(folder: Path, pipe: Pipeline, state: State, count: int = 2) -> Path:
    """The last one of some checkpoints."""
    for step in range(1, count + 1):
        checkpoint.save(folder, pipe, state.replace(step=step), NOTES._replace(best=None))
    return folder / checkpoint.FOLDER / str(count)


def arrays_of(step: Path) -> list[Path]:
    return [file for file in sorted((step / "state").rglob("d/*")) if file.is_file()]


def test_a_checkpoint_of_a_version_without_digests_is_read(trained, tmp_path: Path) -> None:
    pipe, state = trained
    about(saved(tmp_path, pipe, state), lambda told: told["notes"].pop("waited"))
    assert_same(checkpoint.restore(pipe, tmp_path).state, state)


GARBLED: dict[str, Callable[[dict], object]] = {
    **{f"no {name}": lambda told, name=name: told.pop(name) for name in FIELDS},
    **{f"{name} is text": lambda told, name=name: told.update({name: "a"}) for name in FIELDS},
    "step is half": lambda told: told.update(step=1.5),
    "a row is no row": lambda told: told.update(rows=[1]),
    "a row without a name": lambda told: told["rows"][0].pop("name"),
    "a row without shapes": lambda told: told["rows"][0].update(params=None),
    "too short a key": lambda told: told["key"].pop(),
    "a key that is too large": lambda told: told.update(key=[2**40, 0]),
    "many keys": lambda told: told.update(key=[told["key"], told["key"]]),
    "a note of another name": lambda told: told["notes"].update(bast=told["notes"].pop("best")),
    "a note of another kind": lambda told: told["notes"].update(position=["a", 0]),
    "a note that is too short": lambda told: told["notes"].update(last=[1]),
    "files are none": lambda told: told.update(files=[1]),
}


@pytest.mark.parametrize("field", GARBLED)
def test_what_a_checkpoint_tells_is_damaged(trained, tmp_path: Path, field: str) -> None:
    """JSON that is none any more was one line, JSON with a wrong or missing field a traceback: here without a digest.

    One flipped bit gave "Notes.__new__() got an unexpected keyword argument 'bast'".
    """
    pipe, state = trained
    about(saved(tmp_path, pipe, state), GARBLED[field])
    for read in (lambda: checkpoint.restore(pipe, tmp_path), lambda: checkpoint.best(tmp_path)):
        with pytest.raises(
            InputError, match=r"checkpoints/2 is damaged \(.+\): delete .* step 1 instead \(whole: 1\)$"
        ):
            read()


def test_a_wrong_number_in_what_a_checkpoint_tells_is_noticed(trained, tmp_path: Path) -> None:
    """A flipped bit in `rate` or `batches` was still a number, and the run went on with it."""
    pipe, state = trained
    about(saved(tmp_path, pipe, state), lambda told: told.update(batches=told["batches"] + 1), sealed=True)
    message = (
        r"2 is damaged \(ValueError: about/metadata is not as it was written\): delete or move it, to use step 1 in"
    )
    with pytest.raises(InputError, match=message):
        checkpoint.restore(pipe, tmp_path)
    with pytest.raises(InputError, match=message):
        checkpoint.best(tmp_path)


@pytest.mark.parametrize("flipped", [0, -1])
def test_a_flipped_bit_in_the_arrays_is_noticed(trained, tmp_path: Path, flipped: int) -> None:
    """Only sizes were checked: the parameters of the run, or a few of them, were silently others."""
    pipe, state = trained
    step = saved(tmp_path, pipe, state)
    assert len(arrays_of(step)) > 2
    for file in arrays_of(step):
        content = bytearray(file.read_bytes())
        content[flipped] ^= 1
        whole = file.read_bytes()
        file.write_bytes(content)
        message = rf"2 is damaged \(ValueError: {file.relative_to(step)} is not as it was written\): .* step 1 instead"
        with pytest.raises(InputError, match=message):
            checkpoint.restore(pipe, tmp_path)
        file.write_bytes(whole)
    assert_same(checkpoint.restore(pipe, tmp_path).state, state)


def test_garbage_of_the_same_size_without_digests(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What read it raised a bare `Exception`, which nobody took for damage: a traceback.

    That error is feigned here: after a real one, orbax leaves coroutines behind that fail other tests.
    """
    pipe, state = trained
    about(saved(tmp_path, pipe, state), lambda _: None)

    def garbled(*_: object, **__: object) -> None:
        raise Exception(
            "Encountered error while reading array index: (slice(0, 8, 1),).\n  See full TensorStore details"
        )

    monkeypatch.setattr(ocp.CheckpointManager, "restore", garbled)
    with pytest.raises(
        InputError, match=r"2 is damaged \(Exception: Encountered .* 1\),\)\. See full .*\): delete or mo"
    ):
        checkpoint.restore(pipe, tmp_path)


def test_an_error_that_is_no_damage_is_not_called_so(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever believes it deletes a good checkpoint."""
    pipe, state = trained
    saved(tmp_path, pipe, state)

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(ocp.CheckpointManager, "restore", out_of_memory)
    with pytest.raises(RuntimeError, match="Out of memory"):
        checkpoint.restore(pipe, tmp_path)


def test_saving_again_does_not_take_damage_for_whole(trained, tmp_path: Path) -> None:
    """The arrays are not written again, so what was noted of them stays."""
    pipe, state = trained
    file = arrays_of(saved(tmp_path, pipe, state))[-1]
    file.write_bytes(bytes(file.stat().st_size))
    checkpoint.save(tmp_path, pipe, state, NOTES)
    with pytest.raises(InputError, match=r"checkpoints/2 is damaged"):
        checkpoint.restore(pipe, tmp_path)


def test_no_step_is_advised_that_is_damaged_too(trained, tmp_path: Path) -> None:
    """It said to use one of which the arrays were garbage of the same size."""
    pipe, state = trained
    last = saved(tmp_path, pipe, state)
    for step in (last, last.with_name("1")):
        for file in arrays_of(step):
            file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(InputError, match=r"no other one is whole, so train anew, with another --run-dir$"):
        checkpoint.restore(pipe, tmp_path)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EACCES, "give this user the right to read it"), (errno.EMFILE, "mend that and try again")],
)
@pytest.mark.parametrize("part", ["about/metadata", "state/d", "state/ocdbt.process_0"])
def test_a_checkpoint_that_may_not_be_read_is_not_damaged(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, number: int, remedy: str
) -> None:
    """After `chmod 0` the advice was to delete it. Root may read all, so the system's refusal is feigned here."""
    pipe, state = trained
    step = saved(tmp_path, pipe, state)
    opened = Path.open

    def refuse(self: Path, *args, **kwargs):
        if str(self).startswith(str(step / part)):
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=rf"checkpoints/2 cannot be read \({os.strerror(number)}\): {remedy}$"):
        checkpoint.restore(pipe, tmp_path)


def test_checkpoints_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(InputError, match=r"checkpoints cannot be read \(Permission denied\): give this user the right"):
        checkpoint.latest(tmp_path)


def test_a_file_in_place_of_the_checkpoints_is_refused(trained, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(InputError, match=r"checkpoints is a file, wanted the directory of the checkpoints: move it"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ValueError("RESOURCE_EXHAUSTED: Error writing local file"), "RESOURCE_EXHAUSTED: Error writing local file"),
        (
            ValueError(
                'RESOURCE_EXHAUSTED: Failed writing: "/a/d/0.__lock": Failed to write 3363 bytes to file 8: No space '
                "left on device [os_error_code='28']"
            ),
            "No space left on device",
        ),
    ],
)
def test_a_disk_without_room_is_one_line(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """Only "Error writing" was known: the library also says "Failed writing", which was a traceback."""

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(InputError, match=rf"checkpoints cannot be written \({reason}\): make room for it"):
        checkpoint.save(tmp_path, *trained, NOTES)


def test_the_line_of_a_disk_without_room_stands_alone(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stood among some 200 lines of tracebacks, one for each array that was being written."""

    def full(*_: object, **__: object) -> None:
        for name in ("absl", "asyncio"):
            for error in (OSError("full"), ValueError("RESOURCE_EXHAUSTED: Failed writing"), ValueError("another")):
                try:
                    raise error
                except (OSError, ValueError):
                    logging.getLogger(name).exception("an array was not written")
        raise ValueError("RESOURCE_EXHAUSTED: Failed writing")

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(InputError, match="cannot be written"):
        checkpoint.save(tmp_path, *trained, NOTES)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["another"] * 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden": (7, 9, 11)}, r"of another model: its rows are \['embed', 'lstm 1', 'lstm 2', 'head'\], this one's"),
        (
            {"hidden": (5, 11)},
            r"another model: row 'lstm 1' has float32\[11, 28\] at .kernel, this one's has float32\[11, 20\]",
        ),
        (
            {"vocab": 14},
            r"another model: row 'embed' has float32\[13, 11\] at .table, this one's has float32\[14, 11\]",
        ),
        ({"optimizer": optax.sgd(0.1)}, r"another optimizer: row 'embed' has .* this one's has nothing: use the conf"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer(placed: Placed, trained, tmp_path, other, message: str) -> None:
    checkpoint.save(tmp_path, *trained, NOTES)
    pipe = placed((2, 3) if len(other.get("hidden", ())) == 3 else (2, 2), **other)
    with pytest.raises(InputError, match=message):
        checkpoint.restore(pipe, tmp_path)


def test_no_checkpoint(placed: Placed, trained, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no checkpoint: train first"):
        checkpoint.restore(placed(), tmp_path)
    checkpoint.save(tmp_path, *trained, NOTES)
    with pytest.raises(InputError, match=r"has no checkpoint of step 7, only of \[2\]"):
        checkpoint.restore(placed(), tmp_path, 7)


def test_reading_makes_no_directory(tmp_path: Path) -> None:
    assert checkpoint.steps(tmp_path / "run") == []
    assert not (tmp_path / "run").exists()
