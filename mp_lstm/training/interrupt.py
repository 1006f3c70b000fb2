"""Ctrl-C and SIGTERM while training: the step in flight is finished and the state saved, then the run ends.

The second signal does what it does without us, for a user who will not wait.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[], int | None]]:
    """Notes the first SIGINT or SIGTERM instead of dying of it.

    Only the main thread may handle signals: in another one, this does nothing.

    Yields:
      A function that tells the signal's number, None while there was none.

    Example:
      >>> with stop_signal() as stop:
      ...     before = stop()
      ...     signal.raise_signal(signal.SIGTERM)
      ...     before, signal.Signals(stop()).name
      (None, 'SIGTERM')
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            before[number] = signal.signal(number, handle)
    try:
        yield lambda: received[0] if received else None
    finally:
        restore()
