"""Runs of the tiny setup: what they write, how they stop, and that a resumed one is as if it had never stopped.

Long, because every way to stop and to go on is held against the same uninterrupted runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mp_lstm.data import ContiguousBatches, Split, Vocabulary
from mp_lstm.errors import InputError
from mp_lstm.layers import checks
from mp_lstm.layers.batch import Batch
from mp_lstm.training import checkpoint
from mp_lstm.training.config import load_saved
from mp_lstm.training.fit import SplitResult, evaluate, fit
from mp_lstm.training.loop import windows
from mp_lstm.training.metrics import read_metrics
from mp_lstm.training.run_directory import held
from mp_lstm.training.setup import Setup

Tiny = Callable[..., Setup]

FIELDS = {
    "start": {"placement", "parameters", "vocab", "buckets", "schedule", "chunk", "dropped"},
    "train": {"step", "epoch", "loss", "perplexity", "tokens", "tokens_per_second", "grad_norm", "learning_rate"},
    "valid": {"step", "epoch", "loss", "perplexity", "tokens"},
    "test": {"step", "epoch", "loss", "perplexity", "tokens"},
    "done": {"steps", "seconds", "programs", "compiled_after_warmup"},
}


class Source:
    """A source whose batches a test may change, or take as the moment to do something."""

    def __init__(self, source: Any, change: Callable[[int, int, Batch], Batch]):
        self._source = source
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batch(self, epoch: int, index: int) -> Batch:
        return self._change(epoch, index, self._source.batch(epoch, index))


def with_train(setup: Setup, change: Callable[[int, int, Batch], Batch]) -> Setup:
    return setup._replace(sources=setup.sources._replace(train=Source(setup.sources.train, change)))


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run_dir / "metrics.jsonl") if event["event"] in kinds]


def untimed(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in event.items() if k != "tokens_per_second"} for event in events(run_dir, *kinds)]


def trained(setup: Setup, run_dir: Path, step: int | None = None) -> list[np.ndarray]:
    """All numbers of a checkpoint, in the order of the rows whatever the stages."""
    state = checkpoint.restore(setup.pipe, run_dir, step).state
    params = [row for stage in state.stages for row in stage.own]
    optimizer = [row for stage in state.stages for row in stage.optimizer]
    everything = (params, optimizer, state.carry, state.rate, state.step, state.batches)
    return [np.array(leaf) for leaf in jax.tree.leaves(everything)]


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory) -> Path:
    """The directory of a run that nothing interrupts: 2 epochs of 10 steps."""
    run_dir = tmp_path_factory.mktemp("whole")
    fit(tiny(), run_dir)
    return run_dir


def test_a_run_writes_every_event_with_its_fields(whole: Path) -> None:
    found = read_metrics(whole / "metrics.jsonl")
    assert {event["event"]: set(event) - {"event"} for event in found} == FIELDS
    assert [event["event"] for event in found] == [
        "start", *["train"] * 5, "valid", *["train"] * 5, "valid", "test", "done",
    ]  # fmt: skip
    steps = [(event["step"], event["epoch"]) for event in found if event["event"] in ("train", "valid")]
    assert steps == [
        (2, 1),
        (4, 1),
        (6, 1),
        (8, 1),
        (10, 1),
        (10, 1),
        (12, 2),
        (14, 2),
        (16, 2),
        (18, 2),
        (20, 2),
        (20, 2),
    ]


def test_start_tells_where_everything_is(whole: Path, devices) -> None:
    (start,) = events(whole, "start")
    placement = [tuple(row.values()) for row in start["placement"]]
    assert placement == [
        ("embed", "embedding", 0, str(devices[0]), 42),
        ("lstm 1", "lstm", 0, str(devices[0]), 480),
        ("lstm 2", "lstm", 1, str(devices[1]), 544),
        ("head", "head", 1, str(devices[1]), 63),
    ]
    rest = {name: value for name, value in start.items() if name not in ("event", "placement")}
    assert rest == {
        "parameters": 1129, "vocab": 7, "buckets": [4, 8], "schedule": "wavefront", "chunk": [4, 4], "dropped": 0,
    }  # fmt: skip


def test_after_the_warm_up_nothing_is_compiled(whole: Path, tiny: Tiny) -> None:
    """Steps, validations, checkpoints, the test: a program compiled anywhere in the process would count."""
    (done,) = events(whole, "done")
    assert (done["steps"], done["programs"], done["compiled_after_warmup"]) == (20, len(tiny().pipe.programs), 0)


def test_every_real_token_of_an_epoch_is_trained_on_once(whole: Path, tiny: Tiny) -> None:
    lines = events(whole, "train")
    for epoch in (1, 2):
        assert sum(line["tokens"] for line in lines if line["epoch"] == epoch) == tiny().sources.train.tokens


def test_training_learns(whole: Path) -> None:
    losses = [event["loss"] for event in events(whole, "valid")]
    assert losses[-1] < losses[0] < math.log(7)


def test_a_picture_is_drawn(whole: Path) -> None:
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_costs_the_picture_alone(tiny: Tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert fit(tiny(train={"max_steps": 1}), tmp_path).test is not None
    assert capsys.readouterr().out.splitlines()[-1].endswith("(pip install 'mp-lstm[plot]')")


def test_placement_timetable_and_what_is_dropped_are_printed_first(tiny: Tiny, tmp_path: Path, capsys) -> None:
    setup = tiny(train={"max_steps": 2})
    fit(setup, tmp_path)
    out = capsys.readouterr().out
    assert out.startswith(f"text: alphabet, {len(setup.corpus.train.tokens)} tokens, 7 words\n\n{setup.plan}\n")
    longest = out.index("wavefront, bucket 8, the commonest: 2 chunks of 4 steps\n")
    assert f"\n{setup.plan.schedule((8,))}\n" in out[longest:]
    assert "\n0 sentences (0 tokens) dropped\n" in out
    assert "\nepoch 1  step 2/2  loss " in out


def test_the_commonest_bucket_is_shown(tiny: Tiny, tmp_path: Path, capsys) -> None:
    """Nearly all batches are made short ones."""

    def shorten(epoch: int, index: int, batch: Batch) -> Batch:
        if index == 0:
            return batch
        return batch._replace(inputs=batch.inputs[:4], targets=batch.targets[:4], lengths=np.minimum(batch.lengths, 4))

    fit(with_train(tiny(train={"max_steps": 1}), shorten), tmp_path)
    assert "wavefront, bucket 4, the commonest: uncut\n" in capsys.readouterr().out


def test_a_batch_cut_by_rows_is_not_called_uncut(tiny: Tiny, tmp_path: Path, capsys) -> None:
    """The title of its timetable, which shows them, once said so."""
    fit(tiny(pipeline={"schedule": "gpipe", "chunk": "auto", "microbatches": 2}, train={"max_steps": 1}), tmp_path)
    assert "gpipe, bucket 8, the commonest: 2 micro-batches of 2 rows\n" in capsys.readouterr().out


# Stopping and resuming.

RESUMED = {
    "plain": {},
    # The rate is lowered twice before the stop; windows have three batches, the last of an epoch has one.
    "plateau": {
        "optimizer": {
            "rate_schedule": "plateau", "plateau_threshold": 0.9, "learning_rate": 0.03, "every_k": 3,
        },
        "train": {"epochs": 4, "log_every": 3, "eval_every": 5},
    },
    "carried": {"data": {"batch_size": 4, "mode": "contiguous", "length": 4}},
    "schedule": {"optimizer": {"learning_rate": 0.03, "rate_schedule": "cosine_decay_schedule"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("plain", "max_steps"),
        ("plain", "SIGINT"),
        ("plateau", "SIGINT"),
        ("carried", "max_steps"),
        ("schedule", "max_steps"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tiny: Tiny, tmp_path: Path, kind: str, how: str, capsys) -> None:
    """Bit for bit, stopped in the middle of the last epoch and of a line of metrics: state, rate, metrics."""
    setup = tiny(**RESUMED[kind])
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    result = fit(setup, whole)
    per_epoch = result.steps // setup.config.train.epochs
    epoch = setup.config.train.epochs - 1
    stop = next(s for s in range(epoch * per_epoch + 1, result.steps) if s % setup.config.train.log_every)
    if how == "max_steps":
        train = dataclasses.replace(setup.config.train, max_steps=stop)
        stopped = fit(setup._replace(config=dataclasses.replace(setup.config, train=train)), halves)
        assert (stopped.steps, stopped.signal) == (stop, None)
    else:

        def interrupt(at: int, index: int, batch: Batch) -> Batch:
            """Comes while the last batch of step `stop` is made: that step is still done."""
            if (at, index + 1) == (epoch, (stop - epoch * per_epoch) * setup.pipe.every_k):
                signal.raise_signal(signal.SIGINT)
            return batch

        stopped = fit(with_train(setup, interrupt), halves)
        assert (stopped.steps, stopped.signal, stopped.test) == (stop, signal.SIGINT, None)
        assert f"mp-lstm train --run-dir {halves} --resume" in capsys.readouterr().out
        assert not events(halves, "done")
    again = fit(setup, halves, resume=True)
    for got, want in zip(trained(setup, halves), trained(setup, whole), strict=True):
        np.testing.assert_array_equal(got, want)
    assert untimed(halves, "train", "valid", "test") == untimed(whole, "train", "valid", "test")
    assert (again.steps, again.best, again.test) == (result.steps, result.best, result.test)
    assert len(events(halves, "start")) == 2
    assert len(events(halves, "done")) == 1
    if kind == "plateau":
        rates = [line["learning_rate"] for line in events(whole, "train")]
        assert min(rates) < max(rates), "the rate was never lowered: this case shows nothing"


@pytest.mark.parametrize("stages", [1, 3])
def test_a_run_goes_on_with_another_number_of_stages(tiny: Tiny, whole: Path, tmp_path: Path, stages: int) -> None:
    fit(tiny(train={"max_steps": 13}), tmp_path)
    other = tiny(stages)
    fit(other, tmp_path, resume=True)
    for got, want in zip(trained(other, tmp_path), trained(tiny(), whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    got, want = (events(run_dir, "train") for run_dir in (tmp_path, whole))
    assert [line["step"] for line in got] == [line["step"] for line in want]
    np.testing.assert_allclose([line["loss"] for line in got], [line["loss"] for line in want], rtol=1e-5)


def test_a_run_that_was_killed_loses_the_lines_after_its_last_checkpoint(
    tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    """An error in step 18 stands for the kill: the checkpoint is of step 15, lines of 16 are on disk."""

    def crash(epoch: int, index: int, batch: Batch) -> Batch:
        if (epoch, index) == (1, 8):
            raise RuntimeError("killed")
        return batch

    setup = tiny(train={"checkpoint_every": 5})
    with pytest.raises(RuntimeError, match="killed"):
        fit(with_train(setup, crash), tmp_path)
    assert checkpoint.latest(tmp_path) == 15
    assert events(tmp_path, "train")[-1]["step"] == 16
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "tra')
    fit(setup, tmp_path, resume=True)
    assert untimed(tmp_path, "train", "valid", "test") == untimed(whole, "train", "valid", "test")


def test_resuming_a_finished_run_repeats_its_test_and_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    setup = tiny(train={"max_steps": 3})
    first = fit(setup, tmp_path)
    lines = untimed(tmp_path, "train", "valid", "test")
    again = fit(setup, tmp_path, resume=True)
    assert again._replace(seconds=0.0) == first._replace(seconds=0.0)
    assert untimed(tmp_path, "train", "valid", "test") == lines


def test_a_resumed_run_says_that_nothing_is_left_to_train(tiny: Tiny, tmp_path: Path, capsys) -> None:
    """It used to compile, validate and test without a word about why no step was done."""
    setup = tiny(train={"max_steps": 3})
    fit(setup, tmp_path)
    assert fit(setup, tmp_path, resume=True).steps == 3
    assert "\nresumed after step 3, the last of the run: raise train.epochs or" in capsys.readouterr().out


def test_a_run_killed_before_its_first_checkpoint_begins_anew(tiny: Tiny, tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "start"}\n{"event": "train", "step": 2}\n')
    assert fit(tiny(train={"max_steps": 2}), tmp_path, resume=True).steps == 2
    assert [event["event"] for event in read_metrics(tmp_path / "metrics.jsonl")].count("start") == 1
    assert "\nthere is no checkpoint yet: begun anew\n" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["killed", "SIGTERM"])
def test_the_last_step_may_be_the_best_though_it_was_saved_before_it_was_validated(
    tiny: Tiny, tmp_path: Path, how: str
) -> None:
    """Killed after the checkpoint of step 18, and ended there when it went on: the best stayed step 15, on disk.

    Or the signal to stop came with the last step, 18, of the run.
    """

    def stop(epoch: int, index: int, batch: Batch) -> Batch:
        if how == "killed" and (epoch, index) == (1, 8):
            raise RuntimeError("killed")
        if how == "SIGTERM" and (epoch, index) == (1, 7):
            signal.raise_signal(signal.SIGTERM)
        return batch

    often = {"eval_every": 15, "checkpoint_every": 6}
    first = tiny(train=often | ({} if how == "killed" else {"max_steps": 18}))
    with contextlib.suppress(RuntimeError):
        fit(with_train(first, stop), tmp_path)
    assert (checkpoint.latest(tmp_path), checkpoint.best(tmp_path)) == (18, 15)
    second = tiny(train=often | {"max_steps": 18})
    result = fit(second, tmp_path, resume=True)
    assert result.best is not None
    assert result.best.step == checkpoint.best(tmp_path) == 18
    best = checkpoint.restore(second.pipe, tmp_path, checkpoint.best(tmp_path))
    assert best.notes.tested == result.best
    assert evaluate(second, best.state, "test") == result.test


def test_a_run_whose_best_checkpoint_is_gone_finds_another(tiny: Tiny, tmp_path: Path) -> None:
    """It would end without one, or look for the one that is gone."""
    setup = tiny(train={"epochs": 4})
    best = fit(with_train(setup, mislead), tmp_path).best
    assert best is not None
    assert best.step == 10
    shutil.rmtree(tmp_path / "checkpoints" / "10")
    again = fit(setup, tmp_path, resume=True)
    assert again.best is not None
    assert again.best.step == checkpoint.best(tmp_path) == 40


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_trained_by_one_process_at_a_time(tiny: Tiny, tmp_path: Path, resume: bool) -> None:
    """Two that resumed one run wrote over each other's checkpoints and metrics."""
    setup = tiny(train={"max_steps": 1})
    if resume:
        fit(setup, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with held(tmp_path), pytest.raises(InputError, match=r"is being trained by another process: wait for it, or stop"):
        fit(setup, tmp_path, resume=resume)
    assert sorted(tmp_path.rglob("*")) == before
    assert fit(setup, tmp_path, resume=resume).steps == 1


def test_a_run_has_the_files_that_commands_need(tiny: Tiny, tmp_path: Path) -> None:
    """Two that began at once wrote over each other's: now they are written by whom the directory is."""
    setup = tiny(train={"max_steps": 1})
    fit(setup, tmp_path)
    assert load_saved(tmp_path / "config.toml") == setup.config
    assert Vocabulary.load(tmp_path / "vocabulary.txt") == setup.corpus.vocabulary
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(tmp_path / "config.toml", other)
    with pytest.raises(InputError, match="other holds another run: pass --resume to continue it"):
        fit(tiny(), other)
    assert [path.name for path in other.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_what_cannot_be_written_is_said_before_a_resumed_run_trains(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """On a disk that was read-only by then it trained to its next checkpoint first."""
    fit(tiny(train={"epochs": 1}), tmp_path)
    before, make = (tmp_path / "metrics.jsonl").read_bytes(), tempfile.TemporaryFile

    def refused(*, dir: Path) -> Any:
        if dir == tmp_path / place:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(
        InputError, match=rf"^{tmp_path / place} cannot be written \(Read-only file system\): make room"
    ):
        fit(tiny(train={"epochs": 2}), tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/*"])
def test_a_run_that_lost_its_checkpoints_does_not_begin_anew(tiny: Tiny, tmp_path: Path, gone: str) -> None:
    """It did, silently, and cut its metrics to nothing first."""
    setup = tiny(train={"epochs": 1})
    fit(setup, tmp_path)
    for path in tmp_path.glob(gone):
        shutil.rmtree(path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(
        InputError, match=r"has no checkpoint any more, though its metrics.jsonl tells of 1 valid.*: put"
    ):
        fit(setup, tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_run_is_resumed_with_torn_metrics(tiny: Tiny, tmp_path: Path) -> None:
    """The line after the torn one was glued to it, and the picture failed at the end."""
    fit(tiny(train={"epochs": 1}), tmp_path)
    os.truncate(tmp_path / "metrics.jsonl", 900)
    assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert fit(tiny(), tmp_path, resume=True).steps == 20
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("name", ["loss.png", "metrics.jsonl"])
def test_a_directory_in_the_way_of_a_file(tiny: Tiny, tmp_path: Path, name: str, capsys) -> None:
    """Of a picture: the run is done all the same. Of metrics: it does not begin."""
    (tmp_path / name).mkdir()
    setup = tiny(train={"max_steps": 1})
    if name == "loss.png":
        assert fit(setup, tmp_path).test is not None
        assert "loss.png cannot be written (Is a directory)" in capsys.readouterr().out
    else:
        with pytest.raises(InputError, match=r"metrics.jsonl cannot be read \(Is a directory\): move it"):
            fit(setup, tmp_path, resume=True)


def test_checkpoints_that_are_a_file_are_refused_at_once(tiny: Tiny, tmp_path: Path, capsys) -> None:
    """The run trained up to its first checkpoint."""
    (tmp_path / "checkpoints").touch()
    with pytest.raises(InputError, match="checkpoints is a file"):
        fit(tiny(), tmp_path, resume=True)
    assert capsys.readouterr().out == ""


def test_a_directory_that_holds_another_run_is_refused(tiny: Tiny, whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"holds another run: pass --resume to continue it, or another --run-dir"):
        fit(tiny(), whole)
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_there_must_be_a_run_to_resume(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere is no run directory, so there is nothing to resume"):
        fit(tiny(), tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


# What is read when.


def test_metrics_are_read_after_the_next_step_has_been_dispatched(tiny: Tiny, tmp_path: Path) -> None:
    """Reading waits for the devices; they must have the next step to work on meanwhile.

    Before each of the first three steps something is compiled (two buckets, evaluations), with nothing in flight.
    """
    setup, log = tiny(train={"epochs": 1, "max_steps": 6}), []

    class Loss:
        def __init__(self, step: int, loss: Any):
            self._step, self._loss = step, loss

        def __float__(self) -> float:
            log.append(f"read {self._step}")
            return float(self._loss)

    class Pipe:
        def __getattr__(self, name: str) -> Any:
            return getattr(setup.pipe, name)

        def step(self, state: Any, window: Any) -> Any:
            log.append(f"step {state.step + 1}")
            state, metrics = setup.pipe.step(state, window)
            return state, metrics._replace(loss=Loss(state.step, metrics.loss))

    fit(setup._replace(pipe=Pipe()), tmp_path)
    assert log[:5] == ["step 1", "read 1", "step 2", "read 2", "step 3"]
    assert log[5:] == ["step 4", "read 3", "step 5", "read 4", "step 6", "read 5", "read 6"]


def test_windows_never_span_epochs_and_lose_no_batch(tiny: Tiny) -> None:
    source = tiny().sources.train
    found = list(windows(source, (0, 0), epochs=2, every_k=4))
    assert [after for after, _ in found] == [(0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (2, 0)]
    assert [len(batches) for _, batches in found] == [4, 4, 2, 4, 4, 2]
    resumed = list(windows(source, (0, 8), epochs=2, every_k=4))
    np.testing.assert_array_equal(resumed[0][1][1].inputs, source.batch(0, 9).inputs)
    assert [after for after, _ in resumed] == [after for after, _ in found[2:]]


# Evaluation.


@pytest.fixture(scope="module")
def state(tiny: Tiny):
    return tiny().pipe.init(jax.random.key(7))


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(tiny: Tiny) -> None:
    setup = tiny()
    zeros = jax.tree.map(np.zeros_like, setup.pipe.params(setup.pipe.init(jax.random.key(0))))
    result = evaluate(setup, setup.pipe.load(zeros), "valid")
    assert result.perplexity == pytest.approx(7.0, rel=1e-6)
    assert result.tokens == setup.sources.valid.tokens


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_loss_of_a_split_is_the_mean_over_its_tokens(tiny: Tiny, state, split: str) -> None:
    """Batches have between 4 and 30 tokens, so the mean of their means would be another number."""
    setup = tiny()
    params, source = setup.pipe.params(state), getattr(setup.sources, split)
    total, tokens, means, loss = 0.0, 0.0, [], jax.jit(setup.model.loss)
    for index in range(source.num_batches()):
        mean, aux = loss(params, source.batch(0, index))
        total, tokens = total + float(aux.loss_sum), tokens + float(aux.weight_sum)
        means.append(float(mean))
    result = evaluate(setup, state, split)
    assert (result.loss, result.tokens) == (pytest.approx(total / tokens, rel=1e-5), tokens)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.loss != pytest.approx(np.mean(means), rel=1e-4)


def test_evaluating_contiguous_text_carries_the_state(tiny: Tiny) -> None:
    """Cut every 4 steps, the text has the loss that it has in one piece."""
    setup = tiny(**RESUMED["carried"])
    state = setup.pipe.init(jax.random.key(7))
    valid = setup.corpus.valid
    one_piece = ContiguousBatches(Split(valid.tokens, valid.offsets), length=valid.tokens.size, batch_size=4).batch(
        0, 0
    )
    loss, params = jax.jit(setup.model.loss), setup.pipe.params(state)
    want, _ = loss(params, one_piece)
    got = evaluate(setup, state, "valid")
    assert got.loss == pytest.approx(float(want), rel=1e-5)
    fresh = [Batch(b.inputs, b.targets, lengths=b.lengths) for b in map(setup.sources.valid.batch, [0] * 4, range(4))]
    uncarried = [loss(params, batch)[1] for batch in fresh]
    assert got.loss != pytest.approx(sum(float(aux.loss_sum) for aux in uncarried) / got.tokens, rel=1e-4)


def test_a_split_that_is_none(tiny: Tiny, state) -> None:
    with pytest.raises(InputError, match="split is 'tset', one of train, valid, test is wanted"):
        evaluate(tiny(), state, "tset")


# Validation, the rate, the best parameters.


def mislead(epoch: int, index: int, batch: Batch) -> Batch:
    """From the second epoch on the targets are nonsense, so validation gets worse."""
    return batch if epoch == 0 else batch._replace(targets=np.full_like(batch.targets, 1))


def test_the_test_is_of_the_best_parameters(tiny: Tiny, tmp_path: Path, capsys) -> None:
    setup = tiny(train={"epochs": 4})
    result = fit(with_train(setup, mislead), tmp_path)
    assert result.best is not None
    assert result.valid is not None
    assert result.best.step == 10 < result.valid.step == 40
    assert result.best.loss < result.valid.loss
    best = checkpoint.restore(setup.pipe, tmp_path, checkpoint.best(tmp_path)).state
    assert best.step == 10, "older than the last two, kept all the same"
    assert evaluate(setup, best, "test") == result.test
    assert events(tmp_path, "test")[0]["step"] == 10
    assert "the best validation came after step 10: its parameters are tested" in capsys.readouterr().out
    assert events(tmp_path, "done")[0]["compiled_after_warmup"] == 0


def test_a_plateau_lowers_the_rate_against_the_best_so_far(tiny: Tiny, tmp_path: Path, monkeypatch) -> None:
    """2.3 is better than the validation before it and 1.999 than the best, but by less than a thousandth."""
    losses = iter([2.0, 2.5, 2.3, 1.999, 1.9, 1.8])
    monkeypatch.setattr("mp_lstm.training.loop.evaluate", lambda *_: SplitResult(next(losses), 7.0, 57))
    setup = tiny(train={"epochs": 6})
    optimizer = dataclasses.replace(setup.config.optimizer, rate_schedule="plateau", rate_factor=0.25)
    fit(setup._replace(config=dataclasses.replace(setup.config, optimizer=optimizer)), tmp_path)
    factors = {line["epoch"]: line["learning_rate"] / 0.03 for line in events(tmp_path, "train")}
    assert factors == pytest.approx({1: 1, 2: 1, 3: 1 / 4, 4: 1 / 16, 5: 1 / 64, 6: 1 / 64})


def test_the_schedules_rate_is_in_the_metrics(tiny: Tiny, tmp_path: Path) -> None:
    setup = tiny(**RESUMED["schedule"])
    fit(setup, tmp_path)
    lines = events(tmp_path, "train")
    want = [0.03 * (1 + math.cos(math.pi * (line["step"] - 1) / 20)) / 2 for line in lines]
    assert [line["learning_rate"] for line in lines] == pytest.approx(want, rel=1e-5)


def test_validations_and_checkpoints_at_intervals(tiny: Tiny, tmp_path: Path) -> None:
    fit(tiny(train={"epochs": 1, "eval_every": 4, "checkpoint_every": 3}), tmp_path)
    assert [event["step"] for event in events(tmp_path, "valid")] == [4, 8, 10]
    assert checkpoint.steps(tmp_path) == [9, 10]


def test_steps_that_fill_no_line_get_one_at_the_end(tiny: Tiny, tmp_path: Path) -> None:
    fit(tiny(train={"max_steps": 3}), tmp_path)
    assert [(line["step"], line["event"]) for line in events(tmp_path, "train", "valid")] == [
        (2, "train"), (3, "valid"), (3, "train"),
    ]  # fmt: skip


# What is not finite.


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may be as large as they like: batches with those of `huge` would be refused."""
    monkeypatch.setattr(checks, "MOST_WEIGHT", math.inf)


def huge(batch: Batch) -> np.ndarray:
    """Weights whose sum is finite, but not the loss with them: all on the first step."""
    weights = np.zeros(batch.targets.shape, np.float32)
    weights[0] = np.finfo(np.float32).max / (weights.shape[1] + 1)
    return weights


def test_a_loss_that_is_not_finite_ends_the_run(unchecked: None, tiny: Tiny, tmp_path: Path, devices) -> None:
    def poison(epoch: int, index: int, batch: Batch) -> Batch:
        return batch._replace(weights=huge(batch)) if (epoch, index) == (0, 7) else batch

    setup = tiny(train={"checkpoint_every": 3})
    message = (
        r"^step 8: loss (?:nan|inf), gradient norm (?:nan|inf), not finite in stage 0 "
        rf"\(embed, lstm 1\) on {devices[0]} and stage 1 \(lstm 2, head\) on {devices[1]}; the step changed no "
        "parameters: the last good checkpoint is of step 6, in "
    )
    with pytest.raises(InputError, match=message):
        fit(with_train(setup, poison), tmp_path)
    assert all(np.isfinite(leaf).all() for leaf in trained(setup, tmp_path))
    assert checkpoint.steps(tmp_path) == [3, 6]


def test_nothing_that_is_not_finite_is_saved(unchecked: None, tiny: Tiny, tmp_path: Path) -> None:
    """Even where the very step after which a checkpoint is due is the bad one."""

    def poison(epoch: int, index: int, batch: Batch) -> Batch:
        return batch._replace(weights=huge(batch)) if index == 2 else batch

    with pytest.raises(InputError, match=r"^step 3: .*: there is no checkpoint yet, in "):
        fit(with_train(tiny(train={"checkpoint_every": 3}), poison), tmp_path)
    assert checkpoint.steps(tmp_path) == []


def test_metrics_are_json_to_the_last_character(whole: Path) -> None:
    for line in (whole / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
