"""scripts/check_cluster.py: a verdict on the devices there are, and a calibration that the planner reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import check_cluster
from mp_lstm import launch
from mp_lstm.planning import Calibration
from several import environment

SCRIPT = Path(check_cluster.__file__)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch, "prepare", lambda *_: None)
    monkeypatch.setattr(check_cluster, "MOST_STAGES", 2)
    return tmp_path / "calibration.toml"


@pytest.mark.slow
def test_this_process(out: Path, capsys: pytest.CaptureFixture[str]):
    assert check_cluster.main(["--quick", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "transparency, 2 stages: passed\n" in told
    assert told.endswith("verdict: all is well\n")
    assert Calibration.load(out).devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def test_what_is_wrong_is_told(out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_cluster, "is_transparent", lambda devices, stages: stages != 2)
    monkeypatch.setattr(check_cluster, "does_learn", lambda devices, steps: (3.0, 2.0))
    assert check_cluster.main(["--quick", "--out", str(out)]) == 1
    told = capsys.readouterr().out
    assert "transparency, 2 stages: FAILED\n" in told
    assert told.endswith("verdict: NOT well: see FAILED above\n")


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert check_cluster.main(["--processes", "2", "--process", "0"]) == 2
    assert capsys.readouterr().err.startswith("check_cluster: --coordinator is not given: give --coordinator HOST")


@pytest.mark.slow
def test_two_processes(tmp_path: Path):
    words = [sys.executable, str(SCRIPT), "--quick", "--processes", "2", "--emulate-devices", "2"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] 2 devices of 2 processes" in done.stdout
    assert done.stdout.endswith("[0] verdict: all is well\n")
