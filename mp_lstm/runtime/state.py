"""What a pipeline's functions take and give: states and metrics, as values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from flax import struct
from jaxtyping import Array, Float, Key

from mp_lstm.layers.base import Params
from mp_lstm.runtime.placement import Tree


class StageState(NamedTuple):
    """What a stage holds between steps: parameters of its rows, an optimiser state a row, and what it is lent."""

    own: Params
    optimizer: Any
    lent: tuple[Params, ...]


@struct.dataclass
class State:
    """A pipeline's state: a value, replaced by every step.

    Args:
      key: training's key, from which dropout masks derive.
      stages: parameters, optimiser states and lent parameters of each stage, on its devices.
      carry: state carried from batch to batch, by stage; None before the first batch that carries.
      step: updates done.
      batches: batches seen.
      rate: factor on the optimiser's updates.
    """

    key: Key[Array, ""]
    stages: tuple[StageState, ...]
    carry: tuple[Tree, ...] | None = None
    step: int = 0
    batches: int = 0
    rate: float = 1.0


class Metrics(NamedTuple):
    """What a step or an evaluation found; device scalars, so that nothing waits until they are read.

    Args:
      loss: mean loss a unit of weight.
      weight: sum of the weights; tokens: number of steps that counted.
      grad_norm: global norm of the gradient before clipping; None in an evaluation.
      square_norms: each stage's part of it, before normalisation.
      carry: state after the batch, in an evaluation with carried state.
    """

    loss: Float[Array, ""]
    weight: float
    tokens: int
    grad_norm: Float[Array, ""] | None = None
    square_norms: tuple[Float[Array, ""], ...] = ()
    carry: tuple[Tree, ...] | None = None

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; waits for the device."""
        loss = float(self.loss)
        return math.exp(loss) if loss < 700 else math.inf

    def not_finite(self) -> list[int]:
        """Stages whose gradient is not finite, the last one too where the loss is not; waits for the device."""
        bad = [s for s, square in enumerate(self.square_norms) if not math.isfinite(float(square))]
        last = len(self.square_norms) - 1
        return bad if math.isfinite(float(self.loss)) or last in bad else [*bad, last]
