"""The watchdog: a process whose peer has stopped says what it waits for, and ends.

A thread looks at the transfers that this process has enqueued (`edges`). The oldest waits for other processes; when it
has waited too long, or has failed because a connection broke, nothing more will come of this run: the process prints
one line and ends, with exit status 1. It ends hard, since what it would wait for on a gentler way out is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

import jax

from mp_lstm.runtime.edges import transfers

INTERVAL = 0.2
"""Seconds between two looks."""

_ended = threading.Lock()
_last: list[str] = ["nothing"]  # what was done last


def watch(limit: float | None) -> None:
    """Starts to watch this process's transfers.

    Args:
      limit: seconds that one may wait for its processes; None: as long as they live.
    """
    threading.Thread(target=_watch, args=(limit,), daemon=True, name="watchdog").start()


def _watch(limit: float | None) -> None:
    seen, since = None, time.monotonic()
    while True:
        time.sleep(INTERVAL)
        try:
            _drop_done()
        except Exception as error:
            give_up(stopped(error))
        head = transfers[0] if transfers else None
        if head is not seen or head is None:
            seen, since = head, time.monotonic()
        elif limit is not None and time.monotonic() - since > limit:
            give_up(f"nothing has come for {limit:g} s (train.step_timeout): another process is stuck or out of reach")


def _drop_done() -> None:
    """Forgets the transfers that are done; raises what made one fail."""
    while transfers and transfers[0].done.is_ready():
        jax.block_until_ready(transfers[0].done)
        _last[0] = transfers.popleft().what


def give_up(reason: str, status: int = 1) -> NoReturn:
    """Ends the process, with one line on what it waits for."""
    if not _ended.acquire(blocking=False):
        time.sleep(60)  # another thread is about to end the process
    waited = transfers[0].what if transfers else "nothing"
    line = f"mp-lstm: process {jax.process_index()}: {reason}; last done: {_last[0]}; waited for: {waited}\n"
    sys.stdout.flush()
    os.write(2, line.encode())
    os._exit(status)


def is_of_a_peer(error: Exception) -> bool:
    """Whether an error came of a transfer between processes, or of waiting for one."""
    return any(word in str(error) for word in ("Gloo", "NCCL", "oordination", "DEADLINE_EXCEEDED"))


def stopped(error: Exception) -> str:
    """What such an error says."""
    return f"another process has stopped ({' '.join(str(error).split())[:120]})"
