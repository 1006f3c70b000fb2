"""Edges, as far as one process has any; distributed/ has them between processes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mp_lstm.runtime import edges
from mp_lstm.runtime.placement import Elsewhere, everywhere, stage_sharding


def test_alone_every_device_is_for_stages(devices: list[jax.Device]):
    assert edges.stage_devices() == devices
    assert edges.edge_device(0) == devices[-1]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch):
    """Devices as two processes have them."""

    class Device:
        def __init__(self, process: int, number: int, platform: str):
            self.process_index, self.id, self.platform = process, 2048 * process + number, platform

    def make(platform: str, each: int) -> list[Device]:
        made = [Device(process, number, platform) for process in (1, 0) for number in range(each)]
        monkeypatch.setattr(edges.jax, "devices", lambda: made)
        monkeypatch.setattr(edges.jax, "process_count", lambda: 2)
        edges.edge_device.cache_clear()
        return made

    yield make
    edges.edge_device.cache_clear()


@pytest.mark.parametrize(
    ("platform", "each", "ids"),
    [
        ("cpu", 3, [0, 1, 2048, 2049]),  # the last of each is for edges
        ("cpu", 1, [0, 2048]),  # there is no other
        ("gpu", 2, [0, 1, 2048, 2049]),
    ],
)
def test_edges_take_the_last_cpu_device_of_a_process(several, platform: str, each: int, ids: list[int]):
    several(platform, each)
    assert [device.id for device in edges.stage_devices()] == ids


def test_what_all_give_is_added_up_and_remembered():
    values = {"loss": np.float32(2.5), "norms": np.arange(3, dtype=np.float32)}
    found = edges.summed(values, values, "the loss")
    assert jax.tree.map(np.array_equal, found, values) == {"loss": True, "norms": True}
    assert edges.transfers[-1].what == "the loss of all processes"
    found = edges.summed(None, values)
    assert float(found["norms"].sum()) == 0


def test_a_program_of_an_edge_is_no_cheap_one():
    """Programs of fewer than 1,000 operations run in the thread that enqueues them, which would wait for its peer."""
    compiled = edges._adder((((), "float32"),)).compiled
    assert compiled.cost_analysis()["flops"] > 1000


def test_alone_what_a_stage_has_is_everywhere(devices: list[jax.Device]):
    x = jax.device_put(np.ones(3), stage_sharding(devices[1]))
    assert everywhere(x) is x
    assert edges.as_global(x) is x


def test_what_is_elsewhere_is_no_tree():
    leaf = Elsewhere((2, 3), np.dtype(np.float32), stage_sharding(jax.devices()[0]))
    assert jax.tree.leaves({"kernel": leaf}) == [leaf]
