"""What the tables share: runs timed in turn, tables in markdown, and pictures."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

import mp_lstm
from mp_lstm.training.plots import new_figure, save
from presets import seconds_of_round

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARM_UP = 2  # rounds before those that are timed


class Series(NamedTuple):
    """A line of a picture."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Runner:
    """A pipeline that trains: its state, from one timed round to the next.

    Args:
      pipe: a pipeline.
      examples: a window of each shape that will come, for which programs are compiled.
    """

    def __init__(self, pipe: mp_lstm.Pipeline, examples: Sequence[Any]):
        self.pipe = pipe
        pipe.warm_up(examples)
        self._state = pipe.init(jax.random.key(0))

    def seconds(self, windows: Sequence[Any]) -> float:
        """Trains once on each window; seconds until that is done."""
        self._state, seconds = seconds_of_round(self.pipe, self._state, windows)
        return seconds


def in_turn(runs: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Seconds of several runs, all of them once in each round: what the machine does meanwhile meets all alike.

    Args:
      runs: each runs once and says how long it took.
      rounds: that count; some before them do not.
    """
    seconds = [[run() for run in runs] for _ in range(WARM_UP + rounds)]
    return [list(column) for column in zip(*seconds[WARM_UP:], strict=True)]


def full_batch(model: mp_lstm.Model, time: int, rows: int) -> mp_lstm.Batch:
    """A batch of a language model without padding, of random tokens."""
    vocab = model.rows[0].input_ids
    assert vocab is not None, "its first row is an embedding"
    tokens = np.random.default_rng(0).integers(0, vocab, (time + 1, rows)).astype(np.int32)
    return mp_lstm.Batch(tokens[:-1], tokens[1:])


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def prose(*sentences: str) -> str:
    """A paragraph, in lines."""
    return textwrap.fill(" ".join(sentences), 120)


def together(*parts: str) -> str:
    """What a table's text consists of, one below the other."""
    return "\n\n".join(parts)


def draw(path: Path, panels: Sequence[Callable[[Axes], None]]) -> str:
    """Draws a picture of panels side by side; returns the markdown that shows it."""
    figure = new_figure(path, width=520 * len(panels), height=420)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    save(figure, path)
    return f"![{path.stem.replace('-', ' ')}]({os.path.basename(path)})"


def lines(axes: Axes, series: Sequence[Series], x: str, y: str) -> None:
    """Lines through points, with what the axes say."""
    for name, xs, ys in series:
        axes.plot(xs, ys, marker="o", label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
