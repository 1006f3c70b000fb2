"""Pictures of a run. The only module that imports matplotlib, and only when something is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mp_lstm.errors import InputError
from mp_lstm.training.metrics import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_losses(events: Sequence[Event], path: str | os.PathLike[str]) -> None:
    """Draws the losses of a run over its steps: training, validation, and the test as a point.

    Args:
      events: as `read_metrics` gives them.
      path: the picture; its suffix says which kind.

    Raises:
      InputError: matplotlib is not installed.

    Example:
      >>> import tempfile
      >>> events = [{"event": "train", "step": 10, "loss": 5.0}, {"event": "valid", "step": 10, "loss": 5.2}]
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     plot_losses(events, f"{folder}/loss.png")
      ...     os.path.getsize(f"{folder}/loss.png") > 1000
      True
    """
    figure = new_figure(path, width=960, height=600, dpi=120)
    axes = figure.subplots()
    for event, line, marker in (("train", "-", ""), ("valid", "-", "o"), ("test", "", "*")):
        points = [(e["step"], e["loss"]) for e in events if e["event"] == event and e["loss"] is not None]
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, label=event, linestyle=line, marker=marker)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token (nats)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    save(figure, path)


def new_figure(path: str | os.PathLike[str], *, width: float, height: float, dpi: float = 100) -> Figure:
    """Makes an empty figure of `width` x `height` pixels, `dpi` to the inch of its letters.

    Args:
      path: the picture it will be, for the message.
      width, height, dpi: its size.

    Raises:
      InputError: matplotlib is not installed.

    Example:
      >>> new_figure("loss.png", width=1400, height=500).get_size_inches().tolist()
      [14.0, 5.0]
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"{os.path.basename(path)} is not drawn: matplotlib is not installed (pip install 'mp-lstm[plot]')"
        ) from error
    # A figure of its own, not pyplot's: nothing global, no display.
    figure = Figure(figsize=(width / dpi, height / dpi), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)  # it keeps its renderer; without it, measuring a word makes one each time
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure; the path's suffix says which kind of picture.

    Raises:
      InputError: the suffix is of no kind that can be drawn, or the file cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(new_figure("a.png", width=80, height=60), f"{folder}/a.png")
      ...     os.listdir(folder)
      ['a.png']
    """
    try:
        figure.savefig(path)
    except ValueError as error:
        raise InputError(f"{path} cannot be drawn ({error}): pass a file name that ends in .png") from error
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): pass another file name") from error
