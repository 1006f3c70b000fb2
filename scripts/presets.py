"""The models and batches that the scripts here time: those of configs/bench, on full batches of random tokens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import mp_lstm
from mp_lstm.training.build import make_model
from mp_lstm.training.config import load
from peers.problem import Shape

CONFIGS = Path(__file__).parents[1] / "configs"
VOCAB = 10_000
NAMES = ("mxnet", "medium", "large")
BUSY = 0.5
"""Load average above which the machine counts as busy."""


class Preset(NamedTuple):
    """A model, and the shape of its batches."""

    model: mp_lstm.Model
    batch_size: int
    lengths: tuple[int, ...]


def load_preset(name: str) -> Preset:
    """The model of a file in configs/bench."""
    config = load(CONFIGS / "bench" / f"{name}.toml")
    return Preset(make_model(config, VOCAB), config.data.batch_size, (config.data.length,))


def load_contest(name: str) -> tuple[Shape, dict[str, Any], int]:
    """Shape, arguments of `make_plan` that [pipeline] fixes, and unroll of a file in configs/bench."""
    config = load(CONFIGS / "bench" / f"{name}.toml")
    assert isinstance(config.model.hidden, int), "all layers of one size"
    sizes = (config.model.embed, config.model.hidden, config.model.layers, VOCAB)
    shape = Shape(*sizes, config.data.batch_size, config.data.length)
    fields = ("partition", "schedule", "chunk", "microbatches")
    plan = {field: getattr(config.pipeline, field) for field in fields}
    return shape, {field: value for field, value in plan.items() if value != "auto"}, config.pipeline.unroll


def random_batch(preset: Preset) -> mp_lstm.Batch:
    """A batch without padding; loss and speed do not depend on which tokens it holds."""
    shape = (preset.lengths[0] + 1, preset.batch_size)
    tokens = np.random.default_rng(1).integers(0, VOCAB, shape).astype(np.int32)
    return mp_lstm.Batch(tokens[:-1], tokens[1:])


def seconds_of_round(
    pipe: mp_lstm.Pipeline, state: mp_lstm.State, windows: Sequence[Any]
) -> tuple[mp_lstm.State, float]:
    """Trains once on each window; the state after it, and the seconds until it is there."""
    began = time.perf_counter()
    for window in windows:
        state, _ = pipe.step(state, window)
    jax.block_until_ready(state)
    return state, time.perf_counter() - began


def warn_if_busy() -> float:
    """Says so on standard error when the machine has other work; returns the load average."""
    load_average = os.getloadavg()[0]
    if load_average > BUSY:
        print(f"WARNING: the load average is {load_average:.1f}: these times mean little", file=sys.stderr)
    return load_average
