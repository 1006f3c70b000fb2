"""The launcher: several processes as one."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mp_lstm.errors import InputError
from mp_lstm.launcher import launch


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_every_line_has_its_process(capfd: pytest.CaptureFixture[str]):
    assert launch(shell('echo "one of $MP_LSTM_PROCESSES"; echo wrong >&2'), 2) == 0
    wanted = [f"[{i}] {text}" for i in (0, 1) for text in ("one of 2", "wrong")]
    assert sorted(capfd.readouterr().out.splitlines()) == wanted


def test_one_that_fails_ends_all():
    began = time.monotonic()
    assert launch(shell('[ "$MP_LSTM_PROCESS" = 1 ] && exit 3; exec sleep 60'), 2, grace=0.4) == 3
    assert time.monotonic() - began < 20


def test_one_that_will_not_end_is_killed():
    began = time.monotonic()
    script = '[ "$MP_LSTM_PROCESS" = 1 ] && kill -9 $$; trap "" TERM; while :; do sleep 0.1; done'
    assert launch(shell(script), 2, grace=0.4) == 128 + 9
    assert time.monotonic() - began < 20


def test_no_process_is_refused():
    with pytest.raises(InputError, match="--processes is 0, wanted at least 1: pass --processes 2 for two"):
        launch(["true"], 0)


def test_a_disk_that_is_full_is_one_line():
    """The threads that pass lines on died of it with tracebacks, and the rest of the output stood in the pipes."""
    code = 'import sys; from mp_lstm import cli; cli.sys.executable = "echo"; sys.exit(cli.main())'
    words = ["launch", "--processes", "2", "--", "train"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.stderr == (
        "mp-lstm: error: standard output cannot be written (No space left on device): send it elsewhere\n"
    )
    assert done.returncode == 2
