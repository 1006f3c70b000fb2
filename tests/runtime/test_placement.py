"""Shardings of stages and the one function that moves data between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mp_lstm.errors import InputError
from mp_lstm.runtime.placement import put, stage_sharding, structs, transfer


def test_shardings_of_one_device_are_equal(devices: list[jax.Device]) -> None:
    """Two stages may share a device; programs are keyed by stage, arrays fit both."""
    assert stage_sharding(devices[1]) == stage_sharding(devices[1])
    assert stage_sharding(devices[1]) != stage_sharding(devices[2])


@pytest.mark.parametrize("device", ["cpu:0", 0, None])
def test_refuses_what_is_no_device(device: Any) -> None:
    """Plans take anything for a device; JAX's errors named neither it nor the plan."""
    with pytest.raises(InputError, match=rf"a stage's device is {device!r}, one of JAX's is wanted: .*jax.devices\(\)"):
        stage_sharding(device)


def test_arrays_are_committed_where_they_are_sent(devices: list[jax.Device]) -> None:
    here, there = (stage_sharding(device) for device in devices[2:4])
    placed = put({"a": np.ones(3), "b": (np.zeros((), np.int32), None)}, here)
    sent = transfer(placed, there)
    assert {device for leaf in jax.tree.leaves(placed) for device in leaf.devices()} == {devices[2]}
    assert {device for leaf in jax.tree.leaves(sent) for device in leaf.devices()} == {devices[3]}
    assert all(leaf.committed for leaf in jax.tree.leaves((placed, sent)))
    assert jax.tree.structure(sent) == jax.tree.structure(placed)


def test_structs_travel_like_arrays(devices: list[jax.Device]) -> None:
    """So that a walk without arrays compiles for the devices that one with them runs on."""
    here, there = (stage_sharding(device) for device in devices[:2])
    array = put(np.ones((2, 3), np.float32), here)
    assert structs(array) == jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=here)
    assert structs(array, there) == transfer(structs(array), there) == structs(transfer(array, there))
