"""What stops one process ends all of them, in time and with a word; and a run goes on as if it had never stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mp_lstm.launcher import free_port
from several import command, environment, launched, losses, write_place

# Twenty starts of two processes take minutes; more of them run at once would only be slower.
KILLS = 20
RUN = "train tiny.toml --run-dir run --train.epochs 8 --train.checkpoint_every 1 --train.step_timeout 20"
RESUME = "train --run-dir run --resume"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_place(tmp_path)
    return tmp_path


class Started:
    """A launched training that runs."""

    def __init__(self, place: Path, words: str):
        self.log = place / "log"
        line = command("launch", "--processes", "2", "--devices-per-process", "1", "--", *words.split())
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(line, cwd=place, env=environment(), stdout=log, stderr=log)
        self.pids = self._pids()

    def _pids(self) -> list[int]:
        """The processes, in order."""
        children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children")
        return sorted(until(lambda: found if len(found := [*map(int, children.read_text().split())]) == 2 else None))

    def says(self, text: str) -> None:
        """Waits until the log has a text."""
        until(lambda: text in self.log.read_text())

    def ended(self, seconds: float) -> int:
        """The launcher's exit status, within a time, and no process left behind."""
        status = self.launcher.wait(seconds)
        until(lambda: not any(map(is_alive, self.pids)), seconds=5)
        return status


def until(found, seconds: float = 60):
    """Waits for a value that is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def start(place: Path) -> Iterator:
    started: list[Started] = []

    def begin(words: str) -> Started:
        started.append(Started(place, words))
        return started[-1]

    yield begin
    for run in started:
        for pid in (run.launcher.pid, *run.pids):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.launcher.wait()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_peer_is_stuck_says_what_it_waits_for(start, rank: int):
    run = start(RUN.replace("20", "4"))
    run.says("step 3/")
    os.kill(run.pids[rank], signal.SIGSTOP)
    assert run.ended(4 + 15) == 1
    line = next(line for line in run.log.read_text().splitlines() if "nothing has come for 4 s" in line)
    assert line.startswith(f"[{1 - rank}] mp-lstm: process {1 - rank}: ")
    assert "; last done: " in line
    assert "; waited for: " in line
    assert "waited for: nothing" not in line


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_peer_is_gone_says_so_without_a_launcher(place: Path, rank: int):
    words = f"{RUN} --train.emulate_devices 2 --coordinator 127.0.0.1:{free_port()} --processes 2 --process"
    logs = [place / "log0", place / "log1"]
    runs = []
    for i, log in enumerate(logs):
        with log.open("w") as file:
            line = command(*words.replace("20", "5", 1).split(), str(i))
            runs.append(subprocess.Popen(line, cwd=place, env=environment(), stdout=file, stderr=file))
    try:
        until(lambda: "step 3/" in logs[0].read_text())
        runs[1 - rank].kill()
        assert runs[rank].wait(5 + 15) == 1
    finally:
        for run in runs:
            run.kill()
            run.wait()
    (line,) = [line for line in logs[rank].read_text().splitlines() if line.startswith("mp-lstm: ")]
    assert line.startswith(f"mp-lstm: process {rank}: ")
    assert "; waited for: " in line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_saved_and_goes_on(place: Path, start, number: int):
    run = start(RUN)
    run.says("step 3/")
    run.launcher.send_signal(number)
    assert run.ended(30) == 1
    assert f"{signal.Signals(number).name}: stopped and saved after step" in run.log.read_text()
    check_resumes(place)


@pytest.mark.slow
def test_a_run_killed_again_and_again_is_as_if_it_had_never_stopped(place: Path, start):
    rng = random.Random(6)
    for kill in range(KILLS):
        has_begun = (place / "run" / "config.toml").exists()
        run = start(RESUME if has_begun else RUN)
        if kill >= 3:  # the first ones may come before there is anything
            run.says("compiling")
        time.sleep(rng.uniform(0, 4))
        victim = rng.choice([*run.pids, run.launcher.pid])
        if not is_alive(victim):
            continue
        os.kill(victim, signal.SIGKILL)
        run.ended(30)
    check_resumes(place)


def check_resumes(place: Path) -> None:
    """The run goes on to its end, and has found what one that never stopped finds."""
    assert launched(place, RESUME).returncode == 0
    assert launched(place, RUN.replace("--run-dir run", "--run-dir whole")).returncode == 0
    assert losses(place / "run") == losses(place / "whole")
