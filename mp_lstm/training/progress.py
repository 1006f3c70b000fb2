"""What a run tells its user while it trains: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NamedTuple, Protocol, TextIO, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from mp_lstm.training.metrics import perplexity


class Report(NamedTuple):
    """Where training is.

    Args:
      step: updates done; epoch: counted from 1.
      loss: a token, since the last report.
      tokens_per_second: real tokens.
      seconds_left: of the run, at the speed so far; None: not known yet.
    """

    step: int
    epoch: int
    loss: float
    tokens_per_second: float
    seconds_left: float | None = None


@runtime_checkable
class Progress(Protocol):
    """Shows a run's progress."""

    def say(self, text: str) -> None:
        """Prints text, above the bar where there is one."""
        ...

    def step(self, step: int) -> None:
        """An update has been done."""
        ...

    def report(self, report: Report) -> None:
        """There is something to say about training."""
        ...


@contextlib.contextmanager
def progress(total: int, *, done: int = 0, stream: TextIO | None = None) -> Iterator[Progress]:
    """Shows progress while the context is open.

    Args:
      total: updates of the run.
      done: updates done before.
      stream: where to; None: standard output. A terminal gets a bar.

    Yields:
      The progress to report to.

    Example:
      >>> with progress(200) as shown:
      ...     shown.report(Report(step=10, epoch=1, loss=3.912023, tokens_per_second=2345.6, seconds_left=75))
      epoch 1  step 10/200  loss 3.9120  perplexity 50.0  2,346 tokens/s  1:15 left
    """
    to = sys.stdout if stream is None else stream
    console = Console(file=to)
    if not console.is_terminal:
        yield Lines(total, to)
        return
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Bar(*columns, console=console, refresh_per_second=4, expand=True) as bar:
        yield _Bar(bar, total, done)


class Lines(NamedTuple):
    """Progress as plain lines: one a report."""

    total: int
    stream: TextIO

    def say(self, text: str) -> None:
        """Prints text."""
        print(text, file=self.stream, flush=True)

    def step(self, step: int) -> None:
        """Nothing: lines come with reports."""

    def report(self, report: Report) -> None:
        """Prints a line."""
        self.say(f"epoch {report.epoch}  step {report.step}/{self.total}  {describe(report)}")


class _Bar:
    """Progress as rich's bar."""

    def __init__(self, bar: Bar, total: int, done: int):
        self._bar = bar
        self._task = bar.add_task("", total=total, completed=done, epoch="", text="")

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def report(self, report: Report) -> None:
        self._bar.update(self._task, epoch=report.epoch, text=describe(report))


def describe(report: Report) -> str:
    """A report in words: loss, perplexity, real tokens/s, time left."""
    words = [
        f"loss {report.loss:.4f}",
        f"perplexity {perplexity(report.loss):,.1f}",
        f"{report.tokens_per_second:,.0f} tokens/s",
    ]
    if report.seconds_left is not None:
        words.append(f"{clock(report.seconds_left)} left")
    return "  ".join(words)


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    Example:
      >>> clock(75), clock(3675)
      ('1:15', '1:01:15')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
