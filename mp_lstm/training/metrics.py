"""What a run found: metrics.jsonl, means over tokens, and a count of compiled programs.

metrics.jsonl has one JSON object a line, each with an "event". A line is written whole and at once, so a reader never
waits for a buffer, and a run that is killed leaves at most one broken line, which readers skip and the next writer cuts
off. A checkpoint keeps the size of the file, and a resumed run cuts it back to that: its lines are then those of a run
that was never interrupted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mp_lstm.errors import InputError
from mp_lstm.runtime import processes
from mp_lstm.training.files import writing

FILE = "metrics.jsonl"
COMPILED = "/jax/core/compile/backend_compile_duration"

Event = dict[str, Any]


class MetricsWriter:
    """Appends events to a file; `close` it, or use it as a context.

    Args:
      path: the file, made if need be.
      keep: bytes of it that are kept; None: all. A line that was not finished is never kept.

    Raises:
      InputError: the file cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder, MetricsWriter(Path(folder) / "metrics.jsonl") as writer:
      ...     writer.write("valid", step=10, loss=4.5, perplexity=math.inf)
      ...     read_metrics(Path(folder) / "metrics.jsonl")
      [{'event': 'valid', 'step': 10, 'loss': 4.5, 'perplexity': None}]
    """

    def __init__(self, path: Path, *, keep: int | None = None):
        self._path = path
        with writing(path):
            self._file = path.open("ab")
            self._file.truncate(path.read_bytes()[:keep].rfind(b"\n") + 1)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._file.fileno()).st_size

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event; JSON has no infinity, so what is not finite becomes null."""
        fields = {name: _finite(value) for name, value in fields.items()}
        with writing(self._path):
            self._file.write((json.dumps({"event": event, **fields}, allow_nan=False) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        """Closes the file; what could not be written is tried once more."""
        with writing(self._path):
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def metrics_writer(path: Path, *, keep: int | None = None) -> Iterator[MetricsWriter | Silent]:
    """The writer of a run's metrics: of several processes the first one writes.

    Args:
      path, keep: as `MetricsWriter` takes them.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder, metrics_writer(Path(folder) / "metrics.jsonl") as writer:
      ...     writer.write("done", steps=3)
      ...     writer.size
      30
    """
    if not processes.is_first():
        yield Silent()
        return
    with MetricsWriter(path, keep=keep) as writer:
        yield writer


class Silent:
    """In place of a writer: writes nothing."""

    size = 0

    def write(self, event: str, **fields: Any) -> None:
        """Nothing."""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | os.PathLike[str]) -> list[Event]:
    """Reads the events of a file; lines that are none are skipped, such as one that a killed run left unfinished.

    Args:
      path: metrics.jsonl.

    Returns:
      The events, in order; none where there is no file.

    Raises:
      InputError: it cannot be read.

    Example:
      >>> read_metrics("there is no such file")
      []
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be read ({error.strerror}): move it away") from error
    return [event for line in lines if (event := _event(line)) is not None]


def _event(line: bytes) -> Event | None:
    """The event of a line, None where it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def perplexity(loss: float) -> float:
    """The exponential of a mean loss, infinite where it overflows.

    Example:
      >>> round(perplexity(math.log(50)), 6), perplexity(1e4)
      (50.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf


class Sums(NamedTuple):
    """Sums over batches, from which means a token come: every real token counts the same, whatever its batch.

    Args:
      loss: summed loss; weight: what it is divided by.
      tokens: real tokens.
      seconds: spent on them.

    Example:
      >>> sums = Sums().add(2.0, weight=10, tokens=10).add(5.0, weight=5, tokens=5)
      >>> sums.mean, sums.tokens
      (3.0, 15)
    """

    loss: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, mean: float, *, weight: float, tokens: int, seconds: float = 0.0) -> Sums:
        """The sums with one more batch, of this mean loss."""
        return Sums(
            self.loss + mean * weight if weight else self.loss,
            self.weight + weight,
            self.tokens + tokens,
            self.seconds + seconds,
        )

    @property
    def mean(self) -> float:
        """Loss a unit of weight; 0 where nothing counted."""
        return self.loss / self.weight if self.weight else 0.0


@contextlib.contextmanager
def counted_compilations() -> Iterator[Callable[[], int]]:
    """Counts the programs that JAX compiles, or loads from its cache, anywhere in the process.

    Yields:
      A function that tells their number since the context was opened.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones(3)
      >>> with counted_compilations() as count:
      ...     y = jax.jit(lambda x: x * 3 + 1)(x)
      >>> count()
      1
    """
    found = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: len(found)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
