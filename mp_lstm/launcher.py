"""`mp-lstm launch`: several processes of a command on this machine, as one.

    launcher --- process 0: its lines, "[0] " before each
             +-- process 1: "[1] " ...

When one fails, or the user interrupts, all are told to end, and killed if they do not. When the launcher itself is
killed, the kernel ends them: no process is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from mp_lstm.errors import InputError
from mp_lstm.launch import COORDINATOR, LAUNCHER, PROCESS, PROCESSES

GRACE = 10.0
"""Seconds for processes to end by themselves."""


def launch(command: Sequence[str], processes: int, *, grace: float = GRACE) -> int:
    """Runs a command as several processes that find each other.

    Args:
      command: program and arguments, the same for all.
      processes: their number.
      grace: seconds that they have to end by themselves, when they must.

    Returns:
      0 where all ended well, else the exit status of the first that did not; 128 + n where signal n ended it.

    Raises:
      InputError: fewer than one process.

    Example:
      >>> launch(["false"], 2)
      1
    """
    if processes < 1:
        raise InputError(f"--processes is {processes}, wanted at least 1: pass --processes 2 for two")
    told = {COORDINATOR: f"127.0.0.1:{free_port()}", PROCESSES: str(processes), LAUNCHER: str(os.getpid())}
    environment = {**os.environ, **told}
    children = [_start(command, {**environment, PROCESS: str(i)}) for i in range(processes)]
    tellers = [threading.Thread(target=_tell, args=(i, child.stdout)) for i, child in enumerate(children)]
    for teller in tellers:
        teller.start()
    with _forwarded(children):
        try:
            status = _first_failure(children)
        finally:
            _end(children, grace)
            for teller in tellers:
                teller.join()
    return status


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own, so that Ctrl-C reaches it through the launcher alone."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _tell(number: int, stream: IO[bytes] | None) -> None:
    """Prints a process's lines, each with its number."""
    assert stream is not None, "its output is a pipe"
    with stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            with contextlib.suppress(OSError):  # a disk that is full ends no training; the command says so at its end
                print(f"[{number}] {text}\n", end="", flush=True)  # in one piece


@contextlib.contextmanager
def _forwarded(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Passes SIGINT and SIGTERM on to the processes, which save and end; a second one ends them at once."""
    seen: list[int] = []

    def forward(number: int, frame: Any) -> None:
        seen.append(number)
        for child in children:
            _signal(child, number if len(seen) == 1 else signal.SIGKILL)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_failure(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits until one fails or all have ended well; gives the exit status."""
    while True:
        codes = [child.poll() for child in children]
        for code in codes:
            if code:
                return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _end(children: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Ends what still runs, after a moment in which it may end by itself: it may have something to say."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + grace / 2
        while time.monotonic() < until and any(child.poll() is None for child in children):
            time.sleep(0.05)
        for child in children:
            _signal(child, number)
    for child in children:
        child.wait()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a process's group, if it still runs."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
