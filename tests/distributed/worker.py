"""A process of a test in float64: the loss and gradient of a small model over two stages, as process 0 has them.

Run as `worker.py FILE.npz`, by the launcher.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import optax

import mp_lstm
from mp_lstm import launch
from mp_lstm.runtime.placement import everywhere
from mp_lstm.runtime.processes import is_first


def gradient(devices: list[Any], stages: int) -> list[np.ndarray]:
    """The loss and the gradient's arrays."""
    model = mp_lstm.language_model(vocab=11, embed=6, hidden=6, layers=2, dropout=0.3, tie=True, dtype="float64")
    options = {"schedule": "wavefront", "chunk": 4, "microbatches": 2}
    plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=devices, stages=stages, **options)
    pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1), donate=False)
    words = (np.arange(36).reshape(9, 4) * 5) % 11
    state = pipe.init(jax.random.key(3))
    loss, rows = pipe.value_and_grad(state, mp_lstm.Batch(words[:-1], words[1:], lengths=np.array([8, 3, 8, 5])))
    return [np.asarray(loss), *(np.asarray(leaf) for row in rows for leaf in jax.tree.leaves(everywhere(row)))]


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    launch.prepare(2, launch.member(), 60.0)
    found = gradient(mp_lstm.stage_devices(), 2)
    if is_first():
        np.savez(sys.argv[1], *found)
