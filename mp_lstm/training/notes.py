"""What a run keeps beside the pipeline's state: where it is, and what it has found. Values, saved as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mp_lstm.training.metrics import Sums


class Validation(NamedTuple):
    """A validation: the step it came after, and what it found."""

    step: int
    loss: float
    perplexity: float
    tokens: int


class LastStep(NamedTuple):
    """The step before now, as its line of metrics would tell it."""

    step: int
    epoch: int
    grad_norm: float
    learning_rate: float


class Notes(NamedTuple):
    """What the training loop keeps beside the pipeline's state.

    Args:
      position: of the next batch, as sources take it: (epoch, index).
      sums: of the steps since the last line of metrics.
      last: the last step.
      valid: the last validation; best: the one with the least loss.
      plateau: the least loss that the plateau schedule has seen.
      losses: of the validations that decide when averaging begins.
      averages: whether it has begun.
      waited: validations since the best one.
      metrics_size: bytes of metrics.jsonl that belong to the run so far.
      seconds: of the run so far.
    """

    position: tuple[int, int] = (0, 0)
    sums: Sums = Sums()
    last: LastStep | None = None
    valid: Validation | None = None
    best: Validation | None = None
    plateau: float | None = None
    losses: tuple[float, ...] = ()
    averages: bool = False
    waited: int = 0
    metrics_size: int = 0
    seconds: float = 0.0


def notes_from_json(saved: Mapping[str, Any]) -> Notes:
    """Notes as they were before JSON made lists of tuples.

    Args:
      saved: the fields by name.

    Example:
      >>> notes_from_json({"position": [1, 7], "sums": [12.5, 6.0, 6, 0.25], "seconds": 3.5}).position
      (1, 7)
    """
    notes = Notes(**saved)
    epoch, index = notes.position
    return notes._replace(
        position=(epoch, index),
        sums=Sums(*notes.sums),
        losses=tuple(notes.losses),
        last=None if notes.last is None else LastStep(*notes.last),
        valid=None if notes.valid is None else Validation(*notes.valid),
        best=None if notes.best is None else Validation(*notes.best),
    )
