"""Runs of several processes, for tests: a tiny model on a text of a few words, and what its metrics tell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mp_lstm.training.metrics import read_metrics

TINY = """
[data]
source = "text"
buckets = [4, 8]
batch_size = 4
[model]
embed = 6
hidden = 6
layers = 2
dropout = 0.2
[pipeline]
chunk = 4
[optimizer]
learning_rate = 0.01
[train]
epochs = 2
log_every = 1
checkpoint_every = 3
step_timeout = 30.0
"""
SENTENCES = [" ".join("abcdefg"[i % 7] for i in range(length)) for length in (2, 3, 3, 5, 5, 5, 6, 7) * 3]


def write_place(folder: Path) -> None:
    """Writes the text and the configuration of a tiny run."""
    (folder / "text").mkdir()
    for split, lines in (("train", SENTENCES), ("valid", SENTENCES[:6]), ("test", SENTENCES[2:5])):
        (folder / "text" / f"{split}.txt").write_text("\n".join(lines))
    (folder / "tiny.toml").write_text(TINY)


def command(*words: str) -> list[str]:
    """The words of a new process of the command line."""
    return [sys.executable, "-m", "mp_lstm", *words]


def environment() -> dict[str, str]:
    """Of such a process: this package, wherever it is started."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


def launched(folder: Path, words: str, *, processes: int = 2, each: int = 1) -> subprocess.CompletedProcess[str]:
    """Launches a training in a folder, and waits for its end."""
    start = ["launch", "--processes", str(processes), "--devices-per-process", str(each), "--", *words.split()]
    return subprocess.run(
        command(*start), cwd=folder, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )


def losses(run_dir: Path) -> list[float]:
    """Losses of training, by step, then those of validations, by step, then the test's."""
    events = read_metrics(run_dir / "metrics.jsonl")
    return [event["loss"] for kind in ("train", "valid", "test") for event in _last(events, kind)]


def _last(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of a kind, the last of each step."""
    by_step = {event["step"]: event for event in events if event["event"] == kind}
    return [by_step[step] for step in sorted(by_step)]
