from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from mp_lstm.training.interrupt import stop_signal


@pytest.fixture
def python_handles_interrupts() -> Iterator[None]:
    """As in a terminal: a shell's background process ignores SIGINT, and a second one would do nothing."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_signal_is_noted_and_the_second_does_what_it_always_did(python_handles_interrupts: None) -> None:
    with stop_signal() as stop:
        assert stop() is None
        signal.raise_signal(signal.SIGINT)
        assert stop() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_signal():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_leaves_signals_alone() -> None:
    seen = []

    def run() -> None:
        with stop_signal() as stop:
            seen.append(stop())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]
