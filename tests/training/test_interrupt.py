from __future__ import annotations

import signal
import threading

import pytest

from mp_lstm.training.interrupt import stop_signal


def test_the_first_signal_is_noted_and_the_second_does_what_it_always_did() -> None:
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
