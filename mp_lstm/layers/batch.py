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
      targets: [T, B] or [T, B, ...]; None for a model without a loss.
      weights: [T, B] weight of each step in the loss; None: one for every real step. Padding never counts.
      lengths: [B] number of real steps of each row, 0 for an empty row; None: every step is real.
      resets: [B] rows whose carried state starts at zero; None: no state is carried, every row starts at zero.
    """

    inputs: Any
    targets: Any = None
    weights: np.ndarray | None = None
    lengths: np.ndarray | None = None
    resets: np.ndarray | None = None
