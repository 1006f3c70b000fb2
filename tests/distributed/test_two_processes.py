"""Two processes train as one does: the short test of the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from mp_lstm import cli, launch
from several import launched, losses, write_place


def test_two_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "prepare", lambda *_: None)
    assert cli.main(["train", "tiny.toml", "--run-dir", "one", "--pipeline.stages", "2", "--train.max_steps", "5"]) == 0
    done = launched(tmp_path, "train tiny.toml --run-dir two --train.max_steps 5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(Path("two")) == pytest.approx(losses(Path("one")), rel=1e-6)
    told = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]
    assert any("test loss" in line for line in told)
    assert all(line.startswith("[0] ") for line in told), told  # process 0 tells for all
