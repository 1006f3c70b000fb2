"""The watchdog: a process whose peer has stopped says what it waits for, and ends.

A thread looks at the transfers that this process has enqueued (`edges`), of which the oldest waits for other processes,
and at what the process itself waits for (`waiting`). When that takes too long, or has failed because a connection
broke, nothing more will come of this run: the process prints one line and ends, with exit status 1. It ends hard, since
what it would wait for on a gentler way out is gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import jax
from jax._src import distributed  # jax.process_index() would start the devices

from mp_lstm.runtime.edges import Transfer, transfers

INTERVAL = 0.2
"""Seconds between two looks."""

_ended = threading.Lock()
_done: list[str] = ["nothing"]  # what was done last
_waits: list[Transfer] = []  # what the process itself waits for


def watch(limit: float | None) -> None:
    """Starts to watch this process.

    Args:
      limit: seconds that it may wait for others; None: as long as they live.
    """
    threading.Thread(target=_watch, args=(limit,), daemon=True, name="watchdog").start()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Tells the watchdog that this process waits for something of the others while the context is open.

    Args:
      what: it is.

    Example:
      >>> with waiting("the checkpoint"):
      ...     pass
    """
    _waits.append(Transfer(what, None))
    yield  # a wait that has failed stays: it is what the last line will name
    _waits.pop()
    _done[0] = what


def _watch(limit: float | None) -> None:
    seen, since = None, time.monotonic()
    while True:
        time.sleep(INTERVAL)
        try:
            _drop_done()
        except Exception as error:  # of what kind a broken connection's is, differs by collectives and JAX's version
            give_up(stopped(error))
        head = _head()
        if head is not seen or head is None:
            seen, since = head, time.monotonic()
        elif limit is not None and time.monotonic() - since > limit:
            give_up(f"nothing has come for {limit:g} s (train.step_timeout): another process is stuck or out of reach")


def _head() -> Transfer | None:
    """What is waited for."""
    with contextlib.suppress(IndexError):  # another thread may take the last one away
        return _waits[-1] if _waits else transfers[0]
    return None


def _drop_done() -> None:
    """Forgets the transfers that are done; raises what made one fail."""
    while transfers and transfers[0].done.is_ready():
        jax.block_until_ready(transfers[0].done)
        _done[0] = transfers.popleft().what


def give_up(reason: str, status: int = 1) -> NoReturn:
    """Ends the process, with one line on what it waits for."""
    if not _ended.acquire(blocking=False):
        time.sleep(60)  # another thread is about to end the process
    head = _head()
    words = f"{reason}; last done: {_done[0]}; waited for: {head.what if head else 'nothing'}"
    sys.stdout.flush()
    os.write(2, f"mp-lstm: process {distributed.global_state.process_id}: {words}\n".encode())
    os._exit(status)


def is_of_a_peer(error: Exception) -> bool:
    """Whether an error came of a transfer between processes, or of waiting for one."""
    return any(word in str(error) for word in ("Gloo", "NCCL", "oordination", "DEADLINE_EXCEEDED"))


def stopped(error: Exception) -> str:
    """What such an error says."""
    return f"another process has stopped ({' '.join(str(error).split())[:120]})"
