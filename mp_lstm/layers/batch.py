"""A batch of sequences, time-major: what data readers make and models eat.

It is a plain record of host arrays (numpy). Where its parts live on devices is the runtime's business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np


class Batch(NamedTuple):
    """A padded batch.

    Args:
      inputs: any pytree of [T, B, ...] arrays; token ids [T, B] for a language model.
      targets: any pytree of [T, B, ...] arrays; None for a model without a loss. A layer reads zero on padding, and at
        every step without weight, whatever stands there.
      weights: [T, B] weight of each step in the loss, at least 0; None: one for every real step. Padding never counts.
        Without any weight the loss is 0, and so is its gradient: an optimiser with momentum still moves. Terms that
        layers add (`regularisation`) count real steps, whatever weight the loss gives them.
      lengths: [B] number of real steps of each row, 0 for an empty row; None: every step is real.
      resets: [B] rows whose carried state starts at zero; None: no state is carried, every row starts at zero.

    Lists of numbers do for weights, lengths and resets.
    """

    inputs: Any
    targets: Any = None
    weights: np.ndarray | None = None
    lengths: np.ndarray | None = None
    resets: np.ndarray | None = None


def last_step_only(batch: Batch) -> Batch:
    """Makes every row count at its last real step alone: one target for a sequence instead of one for each step.

    With it any head is one for whole sequences. Loss and gradient are then per row, and exact however time is cut.
    Predictions for a batch are those at its last steps: `predictions[lengths - 1, range(B)]`.

    Args:
      batch: its targets hold that of a row at the row's last real step; what stands before is not read. A row must be
        a whole sequence, and no piece of one.

    Returns:
      The same batch with weights that are zero elsewhere.

    Example:
      >>> import mp_lstm, numpy as np
      >>> labels = np.array([4, 7])
      >>> batch = mp_lstm.Batch(np.ones((3, 2, 5)), np.broadcast_to(labels, (3, 2)), lengths=np.array([3, 1]))
      >>> mp_lstm.last_step_only(batch).weights.tolist()
      [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    """
    time, rows = jax.tree.leaves(batch.inputs)[0].shape[:2]
    lengths = np.full(rows, time) if batch.lengths is None else np.asarray(batch.lengths)
    weights = np.ones((time, rows), np.float32) if batch.weights is None else np.asarray(batch.weights)
    last = np.arange(time)[:, None] == lengths[None, :] - 1
    return batch._replace(weights=np.where(last, weights, np.zeros((), weights.dtype)))
