"""Pictures of a run. The only module that imports matplotlib, and only when something is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mp_lstm.errors import InputError
from mp_lstm.training.metrics import Event


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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"{os.path.basename(path)} is not drawn: matplotlib is not installed (pip install 'mp-lstm[plot]')"
        ) from error
    # A figure of its own, not pyplot's: nothing global, no display.
    figure = Figure(figsize=(8, 5), layout="constrained")
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
    figure.savefig(path, dpi=120)
