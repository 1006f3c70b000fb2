"""Committed constants, made once."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import examples
import mp_lstm
from mp_lstm.runtime import constants
from mp_lstm.runtime.constants import Constants
from mp_lstm.runtime.stages import Stage


@pytest.fixture(scope="module")
def stages() -> tuple[Stage, ...]:
    model = mp_lstm.language_model(**examples.SIZES)
    return examples.pipeline(model, lengths=(4,), devices=jax.devices()[2:4]).stages


def test_the_same_array_each_time_on_the_stages_device(stages: tuple[Stage, ...]) -> None:
    kept = Constants(np.float32)
    for stage, device in zip(stages, jax.devices()[2:4], strict=True):
        for make in (
            lambda stage: kept.number(stage, 3),
            lambda stage: kept.factor(stage, 0.5),
            kept.one,
            kept.zero_total,
            lambda stage: kept.key(stage, KEY),
            lambda stage: kept.initial_state(stage, 2),
            lambda stage: kept.zero_dstate(stage, 2),
        ):
            first, second = jax.tree.leaves(make(stage)), jax.tree.leaves(make(stage))
            assert all(a is b for a, b in zip(first, second, strict=True))
            assert all(leaf.devices() == {device} and leaf.committed for leaf in first)


KEY = jax.random.key(1)


def test_another_key_is_sent(stages: tuple[Stage, ...]) -> None:
    kept = Constants(np.float32)
    first, second = kept.key(stages[0], KEY), kept.key(stages[0], jax.random.key(2))
    assert (jax.random.key_data(first) != jax.random.key_data(second)).any()


def test_factors_have_the_type_of_the_loss(stages: tuple[Stage, ...]) -> None:
    assert Constants(np.float16).one(stages[0]).dtype == np.float16
    assert Constants(np.float32).number(stages[0], 1).dtype == np.int32


def test_not_more_are_kept_than_stated(stages: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that changes every step must not fill the memory."""
    monkeypatch.setattr(constants, "NUMBERS_KEPT", 2)
    kept = Constants(np.float32)
    values = [kept.factor(stages[0], value) for value in (1.0, 2.0, 3.0)]
    assert [float(value) for value in values] == [1.0, 2.0, 3.0]
    assert kept.factor(stages[0], 1.0) is values[0]
    assert kept.factor(stages[0], 3.0) is not values[2]
