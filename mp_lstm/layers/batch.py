"""A batch of sequences, time-major: what data readers make and models eat.

It is a plain record of host arrays (numpy). Where its parts live on devices is the runtime's business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Batch(NamedTuple):
    """A padded batch.

    Args:
      inputs: any pytree of [T, B, ...] arrays; token ids [T, B] for a language model.
      targets: any pytree of [T, B, ...] arrays; None for a model without a loss. A layer reads zero on padding, and at
        every step without weight, whatever stands there.
      weights: [T, B] weight of each step in the loss, at least 0; None: one for every real step. Padding never counts.
        Without any weight the loss is 0, and so is the gradient: an optimiser with momentum still moves.
      lengths: [B] number of real steps of each row, 0 for an empty row; None: every step is real.
      resets: [B] rows whose carried state starts at zero; None: no state is carried, every row starts at zero.

    Lists of numbers do for weights, lengths and resets.
    """

    inputs: Any
    targets: Any = None
    weights: np.ndarray | None = None
    lengths: np.ndarray | None = None
    resets: np.ndarray | None = None
