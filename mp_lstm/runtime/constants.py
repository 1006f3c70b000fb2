"""Committed constants of a stage, made once: small numbers, initial states, zeros and ones.

A step would otherwise send the same few bytes to the same device over and over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mp_lstm.layers.base import zero_gradient
from mp_lstm.runtime.placement import DATA, MODEL, Tree, computed, over_rows, own_part, parts_of, put
from mp_lstm.runtime.stages import Stage

NUMBERS_KEPT = 4096
"""Numbers kept for a pipeline; more are made anew each time."""


class Constants:
    """Constants by stage.

    Args:
      dtype: type of losses and their gradients.
    """

    def __init__(self, dtype: Any):
        self.dtype = dtype
        self._kept: dict[Any, Tree] = {}

    def number(self, stage: Stage, value: int) -> jax.Array:
        """A whole number, int32."""
        return self._keep((stage.number, "number", value), lambda: put(np.asarray(value, np.int32), stage.sharding))

    def factor(self, stage: Stage, value: float) -> jax.Array:
        """A number of the loss's type."""
        return self._keep((stage.number, "factor", value), lambda: put(np.asarray(value, self.dtype), stage.sharding))

    def one(self, stage: Stage) -> jax.Array:
        """The gradient of the loss by itself."""
        return self.factor(stage, 1.0)

    def zero_total(self, stage: Stage) -> jax.Array:
        """The loss before the first unit."""
        return self.factor(stage, 0.0)

    def key(self, stage: Stage, key: jax.Array) -> jax.Array:
        """Training's key."""
        kept = self._kept.get((stage.number, "key"))
        if kept is None or kept[0] is not key:
            kept = self._kept[stage.number, "key"] = (key, put(key, stage.sharding))
        return kept[1]

    def first_row(self, stage: Stage, row: int, rows: int) -> jax.Array:
        """The batch row at which a micro-batch begins; on a group of devices, that at which each one's own part does.

        Args:
          stage: on whose devices.
          row: first of the micro-batch.
          rows: of the micro-batch.
        """
        if stage.sharding.mesh.size == 1:
            return self.number(stage, row)
        data, model = (parts_of(stage.sharding, axis) for axis in (DATA, MODEL))

        def make() -> jax.Array:
            firsts = row + np.arange(data, dtype=np.int32).repeat(model) * (rows // data)
            return put(firsts, own_part(stage.sharding))

        return self._keep((stage.number, "row", row, rows), make)

    def initial_state(self, stage: Stage, rows: int, *, whole: bool = False) -> Tree:
        """The state of a stage's layers before the first step: of a micro-batch, or `whole`, as it is carried."""
        sharding = stage.sharding if whole else over_rows(stage.sharding)
        key = stage.number, "state", rows, sharding
        return self._keep(key, lambda: computed(lambda: stage.layer.init_state(rows), sharding))

    def zero_dstate(self, stage: Stage, rows: int) -> Tree:
        """The gradient of the state after the last step."""

        def zeros() -> Tree:
            return zero_gradient(stage.layer.init_state(rows))

        return self._keep((stage.number, "dstate", rows), lambda: computed(zeros, over_rows(stage.sharding)))

    def _keep(self, key: Any, make: Callable[[], Tree]) -> Tree:
        if key not in self._kept:
            if len(self._kept) >= NUMBERS_KEPT:
                return make()
            self._kept[key] = make()
        return self._kept[key]
