"""What a run keeps beside the pipeline's state: where it is, and what it has found. Values, saved as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

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
      at_end: one that is only there because the run ended; what goes on from here does not know of it.
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
    at_end: Validation | None = None
    plateau: float | None = None
    losses: tuple[float, ...] = ()
    averages: bool = False
    waited: int = 0
    metrics_size: int = 0
    seconds: float = 0.0

    @property
    def tested(self) -> Validation | None:
        """The validation with the least loss, that at the end included: whose parameters are tested."""
        if self.at_end is None or (self.best is not None and self.best.loss <= self.at_end.loss):
            return self.best
        return self.at_end


def notes_from_json(saved: Mapping[str, Any]) -> Notes:
    """Notes as they were before JSON made lists of tuples.

    Args:
      saved: the fields by name; one that is not there was not yet known when they were saved.

    Raises:
      KeyError: there is no field of such a name.
      ValueError: a field is of another kind than it should be.

    Example:
      >>> notes_from_json({"position": [1, 7], "sums": [12.5, 6.0, 6, 0.25], "seconds": 3.5}).position
      (1, 7)
    """
    kinds = get_type_hints(Notes)
    return Notes(**{name: _read(value, kinds[name], name) for name, value in saved.items()})


def _read(value: Any, kind: Any, name: str) -> Any:
    """A value from JSON as the kind that a type hint tells: a number, a tuple of one or more kinds, or None."""
    if get_origin(kind) is UnionType:  # of one kind and None
        return None if value is None else _read(value, get_args(kind)[0], name)
    is_tuple, kinds = get_origin(kind) is tuple, get_args(kind)
    if is_tuple or hasattr(kind, "_fields"):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} of the notes is {value!r}")
        if not is_tuple:
            kinds = tuple(get_type_hints(kind).values())
        elif kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(value) != len(kinds):
            raise ValueError(f"{name} of the notes has {len(value)} of {len(kinds)} parts")
        parts = [_read(part, of, name) for part, of in zip(value, kinds, strict=True)]
        return tuple(parts) if is_tuple else kind(*parts)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{name} of the notes is or holds {value!r}")
    return value
