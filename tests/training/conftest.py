"""A tiny run for the tests of training: a language of five words, learnt in seconds by a model of two small layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from mp_lstm.data import Corpus, Split, Vocabulary
from mp_lstm.training.config import from_table
from mp_lstm.training.setup import Setup, make_setup

WORDS = Vocabulary(("<eos>", "<unk>", "a", "b", "c", "d", "e"))

TINY: dict[str, dict[str, Any]] = {
    "data": {"batch_size": 4, "buckets": [4, 8]},
    "model": {"embed": 6, "hidden": 8, "layers": 2, "dropout": 0.2, "tie": False, "residual": "none"},
    "pipeline": {"chunk": 4},
    "optimizer": {"learning_rate": 0.03, "rate_schedule": "constant"},
    "train": {"epochs": 2, "log_every": 2},
}


def language(sentences: int, seed: int) -> Split:
    """Sentences that begin anywhere in the alphabet and go on in its order; the longest have 8 tokens."""
    rng = np.random.default_rng(seed)
    lines = [[2 + (start + i) % 5 for i in range(n)] + [0] for start, n in rng.integers((0, 1), (5, 8), (sentences, 2))]
    offsets = np.cumsum([0, *map(len, lines)])
    return Split(np.array([token for line in lines for token in line], np.int32), offsets)


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return Corpus(language(37, 0), language(11, 1), language(9, 2), WORDS, "alphabet")


@pytest.fixture(scope="session")
def tiny(corpus: Corpus, devices: list[jax.Device]) -> Callable[..., Setup]:
    """Makes tiny setups: `tiny(stages, train={...}, ...)`.

    Those that differ in [train] alone share their programs, and so the length of their rate schedule: two epochs.
    """
    made: dict[tuple[int, str], Setup] = {}

    def make(stages: int = 2, **sections: dict[str, Any]) -> Setup:
        table = {section: TINY.get(section, {}) | sections.get(section, {}) for section in {**TINY, **sections}}
        config = from_table(table)
        plain = dataclasses.replace(config, train=from_table({"train": TINY["train"]}).train)
        key = (stages, str(plain))
        if key not in made:
            made[key] = make_setup(plain, corpus, devices[:stages])
        return made[key]._replace(config=config)

    return make
