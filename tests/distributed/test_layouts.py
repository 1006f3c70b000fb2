"""Any number of processes and stages finds what one process finds, and goes on where another number stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from distributed import worker
from mp_lstm import cli, launch
from mp_lstm.launcher import launch as launch_processes
from mp_lstm.training.metrics import read_metrics
from several import launched, losses, write_place

TRAIN = "train tiny.toml --run-dir"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "prepare", lambda *_: None)
    return tmp_path


def alone(words: str) -> None:
    """Trains in this process."""
    assert cli.main(words.split()) == 0


def together(place: Path, words: str, **options: int) -> None:
    """Trains in several processes."""
    done = launched(place, words, **options)
    assert done.returncode == 0, done.stdout + done.stderr


CLIP = "--optimizer.max_norm 0.1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "cut", "started"),
    [
        *(("", f"--pipeline.stages {stages}", {"processes": 4}) for stages in (1, 2, 3, 4)),
        (f"--pipeline.microbatches 2 {CLIP}", "--pipeline.partition 1 2 1", {"processes": 3}),
        ("--optimizer.every_k 2", "--pipeline.stages 4", {"each": 2}),
        (f"--data.vocab_limit 20 {CLIP}", "--pipeline.data_parallel 2", {"each": 2}),
        (f"--data.vocab_limit 20 {CLIP}", "--pipeline.model_parallel 2", {"each": 2}),
    ],
    ids=[
        *(f"four processes, stages {stages}" for stages in (1, 2, 3, 4)),
        "tied weights over three stages of three processes",
        "stages of a process that are not neighbours",
        "two devices a process, rows divided",
        "two devices a process, vocabulary divided",
    ],
)
def test_losses_are_those_of_one_process(place: Path, words: str, cut: str, started: dict[str, int]):
    alone(f"{TRAIN} one --train.max_steps 6 {words}")
    together(place, f"{TRAIN} several --train.max_steps 6 {words} {cut}", **started)
    assert losses(Path("several")) == pytest.approx(losses(Path("one")), rel=1e-5)


@pytest.mark.slow
def test_six_layouts_of_one_run(place: Path):
    words = "--train.epochs 5 --train.max_steps 30 --data.vocab_limit 20"
    alone(f"{TRAIN} one {words} --pipeline.stages 1")
    alone(f"{TRAIN} stages {words} --pipeline.stages 4")
    alone(f"{TRAIN} data {words} --pipeline.stages 2 --pipeline.data_parallel 2")
    alone(f"{TRAIN} model {words} --pipeline.stages 2 --pipeline.model_parallel 2")
    together(place, f"{TRAIN} processes {words} --pipeline.stages 2")
    together(place, f"{TRAIN} devices {words} --pipeline.stages 4", each=2)
    wanted = losses(Path("one"))
    assert len(wanted) > 30
    for layout in ("stages", "data", "model", "processes", "devices"):
        assert losses(Path(layout)) == pytest.approx(wanted, rel=1e-5), layout


@pytest.mark.slow
def test_rates_and_the_end_of_a_run_are_decided_alike(place: Path):
    words = "--train.epochs 12 --train.patience 2 --optimizer.rate_schedule plateau --optimizer.learning_rate 0.5"
    alone(f"{TRAIN} one {words}")
    together(place, f"{TRAIN} several {words}")
    one, several = (read_metrics(Path(run, "metrics.jsonl")) for run in ("one", "several"))
    rates = [event["learning_rate"] for event in one if event["event"] == "train"]
    assert rates[0] > rates[-1]
    assert [event["learning_rate"] for event in several if event["event"] == "train"] == rates
    assert [event["event"] for event in several] == [event["event"] for event in one]
    assert "stop" in [event["event"] for event in one]


@pytest.mark.slow
def test_a_run_moves_between_numbers_of_processes(place: Path):
    words = "--data.mode contiguous --data.length 8 --optimizer.average True --optimizer.average_after 0"
    alone(f"{TRAIN} one {words} --train.max_steps 12")
    together(place, f"{TRAIN} moved {words} --train.max_steps 4")
    alone("train --run-dir moved --resume --pipeline.stages 1 --train.max_steps 8 --train.emulate_devices 4")
    together(place, "train --run-dir moved --resume --train.max_steps 10", processes=3)
    together(place, "train --run-dir moved --resume --train.max_steps 12", processes=2)
    assert losses(Path("moved")) == pytest.approx(losses(Path("one")), rel=1e-5)
    alone("evaluate moved")


@pytest.mark.slow
def test_gradients_in_float64(tmp_path: Path, x64: None, devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    file = tmp_path / "found.npz"
    assert launch_processes([sys.executable, worker.__file__, str(file)], 2) == 0
    for found, wanted in zip(np.load(file).values(), worker.gradient(devices, 1), strict=True):
        assert found.dtype == np.float64
        assert np.linalg.norm(found - wanted) <= 1e-10 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_what_several_processes_cannot_do_is_refused_by_all(place: Path):
    done = launched(place, "train tiny.toml --run-dir run --pipeline.costs measured")
    assert done.returncode == 2
    assert "costs is 'measured', which several processes would measure differently: pass 'nominal'" in done.stdout
    done = launched(place, "train tiny.toml --run-dir run --pipeline.stages 3")
    assert done.returncode == 2
    assert "3 stages for 2 devices" in done.stdout
    assert not (place / "run").exists()
