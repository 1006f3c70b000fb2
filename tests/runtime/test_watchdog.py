"""The watchdog: what it says, and when."""

from __future__ import annotations

import collections
import threading
from typing import Any

import jax.numpy as jnp
import pytest

from mp_lstm.runtime import watchdog
from mp_lstm.runtime.edges import Transfer


class Never:
    """What never comes, or has failed."""

    def __init__(self, error: Exception | None = None):
        self.error = error

    def is_ready(self) -> bool:
        return self.error is not None

    def block_until_ready(self) -> Any:
        raise self.error or AssertionError("it waits for ever")


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch):
    """Watches some transfers, in place of the process's own, and gives what is written in the end."""
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "_ended", threading.Lock())
    monkeypatch.setattr(watchdog, "_done", ["nothing"])
    monkeypatch.setattr(watchdog, "_waits", [])
    written: list[str] = []

    def end(status: int) -> None:
        written.append(f"status {status}")
        raise Ended

    def watch(*transfers: Transfer, limit: float | None = 0.1) -> list[str]:
        monkeypatch.setattr(watchdog, "transfers", collections.deque(transfers))
        monkeypatch.setattr(watchdog.os, "write", lambda to, text: written.append(text.decode()))
        monkeypatch.setattr(watchdog.os, "_exit", end)
        with pytest.raises(Ended):
            watchdog._watch(limit)
        return written

    return watch


def test_it_names_what_is_done_and_what_is_waited_for(said):
    line, status = said(Transfer("F0 from process 0", jnp.ones(())), Transfer("F1 from process 0", Never()))
    assert line == (
        "mp-lstm: process 0: nothing has come for 0.1 s (train.step_timeout): another process is stuck or out of "
        "reach; last done: F0 from process 0; waited for: F1 from process 0\n"
    )
    assert status == "status 1"


def test_it_ends_at_once_where_a_connection_broke(said):
    line, _ = said(Transfer("F1 from process 0", Never(ValueError("Gloo failed:\nclosed"))), limit=None)
    assert line == (
        "mp-lstm: process 0: another process has stopped (Gloo failed: closed); last done: nothing; waited for: F1 "
        "from process 0\n"
    )


def test_what_the_process_itself_waits_for_comes_first(said):
    with watchdog.waiting("the checkpoint of process 1"):
        line, _ = said(Transfer("F1", Never()))
    assert line.endswith("waited for: the checkpoint of process 1\n")


def test_errors_of_transfers_are_known():
    assert watchdog.is_of_a_peer(ValueError("UNKNOWN: Gloo collective permute failed"))
    assert not watchdog.is_of_a_peer(ValueError("shapes do not agree"))
