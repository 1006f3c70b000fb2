"""Described machines: times by hand, and the messages for files that do not describe one."""

import re
from textwrap import dedent
from typing import NamedTuple

import pytest

from mp_lstm.errors import InputError
from mp_lstm.planning import Calibration, Cost, DeviceRates, LinkRates, Seconds, default_calibration

COST = Cost(
    forward=100,
    backward=200,
    weight=300,
    parameters=7,
    parameter_bytes=28,
    saved_bytes=40,
    transfer_bytes=9,
    kept_bytes=11,
    tape_bytes=13,
    input_bytes=17,
    step_bytes=5,
    scratch_bytes=23,
)
MACHINE = Calibration({"a": DeviceRates(100, 10, 1000, 0.5), "b": DeviceRates(200, 10)}, LinkRates(3, 2))


class Row(NamedTuple):
    cost: object = lambda batch_size, time: COST


class Model(NamedTuple):
    rows: tuple[Row, ...] = (Row(),)


COSTS = MACHINE.costs(Model())


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("F", 100 / 100 + (28 + 3 * 5 + 40 + 11 + 17) / 10),  # a scan of 4 steps reads its kernel 3 times again
        ("B", 200 / 100 + (28 + 3 * 5 + 40 + 13) / 10),
        ("W", 300 / 100 + (17 + 11 + 13 + 2 * 4 * 7) / 10),
        ("U", 7 * 4 * 7 / 10),
    ],
)
def test_time_is_operations_and_bytes(kind, seconds):
    assert COSTS.seconds(kind, 0, 2, 4, "a") == pytest.approx(Seconds(seconds, seconds))


def test_lean_rows_have_costs_of_their_own():
    """W of one needs room for what it computes again."""

    class Layer(NamedTuple):
        cost: object
        lean: object = None

    lean = COST._replace(forward=1000, kept_bytes=3, scratch_weight_bytes=51)
    plain = MACHINE.costs(Model((Row(), Layer(lambda *_: COST, Layer(lambda *_: lean)))))
    costs = plain.lean()
    assert (plain.lean_rows, costs.lean_rows) == (frozenset(), {1})
    assert costs.lean() is costs
    assert COSTS.lean() is COSTS
    for kind in ("F", "B", "W", "U"):
        assert (
            costs.seconds(kind, 0, 2, 4, "a") == plain.seconds(kind, 0, 2, 4, "a") == plain.seconds(kind, 1, 2, 4, "a")
        )
    assert costs.seconds("F", 1, 2, 4, "a").alone == pytest.approx(plain.seconds("F", 1, 2, 4, "a").alone + 9 - 0.8)
    held = plain.memory(1, 2, 4)
    assert costs.memory(0, 2, 4) == held
    assert costs.memory(1, 2, 4) == held._replace(kept=3, scratch_weight=28 + 51)


def test_every_forward_reads_the_weights_again():
    """Work that is four times as large takes less than four times as long, by three readings of the weights."""

    def cost(batch_size, time):
        return Cost(25 * time, 0, 0, 7, 28, 0, 0)

    costs = MACHINE.costs(Model((Row(cost),)))
    cut, whole = (costs.seconds("F", 0, 1, time, "a").alone for time in (1, 4))
    assert 4 * cut - whole == pytest.approx(3 * 28 / 10)


def test_devices_differ_and_share_nothing():
    assert COSTS.seconds("F", 0, 2, 1, "b").alone == COSTS.seconds("F", 0, 2, 1, "a").alone - 0.5
    assert (COSTS.overhead("a"), COSTS.capacity("a"), COSTS.capacity("b")) == (0.5, 1000, None)
    assert COSTS.transfer(6, "a", "b") == 2 + 6 / 3
    assert COSTS.host("a") != COSTS.host("b")


def test_memory_of_a_row():
    memory = COSTS.memory(0, 2, 4)
    assert (memory.parameters, memory.state, memory.largest, memory.scratch_weight) == (28, 56, 28, 28)
    assert memory[3:8] == (40, 11, 13, 17, 9)
    assert (memory.scratch_forward, memory.scratch_backward) == (23, 23)


def test_any_device_is_a_cpu_core_by_default():
    costs = default_calibration().costs(Model())
    assert 1e-5 < costs.overhead(object()) < 1e-3
    assert costs.capacity(object()) is None


def test_an_unknown_device_is_explained():
    with pytest.raises(InputError, match=r"device c is not described, these are: a, b: pass devices=calibration.dev"):
        COSTS.overhead("c")
    with pytest.raises(InputError, match=r"^1 is a device of JAX and no name; it is not described, these are: a, b: "):
        COSTS.overhead(1)


# --- files ---

GOOD = """
    devices = { fast = 2, slow = 1 }

    [device.fast]
    flops_per_second = 4e13
    bytes_per_second = 3e12
    memory_bytes = 80e9
    kernel_seconds = 1e-5

    [device.slow]
    flops_per_second = 1e13
    bytes_per_second = 1e12

    [link]
    bytes_per_second = 5e10
    latency_seconds = 0
    """


def load(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(dedent(text))
    return Calibration.load(path)


def test_file_describes_devices_in_order(tmp_path):
    calibration = load(tmp_path, GOOD)
    assert calibration.devices == ("fast:0", "fast:1", "slow:0")
    assert calibration.rates["fast:1"] == DeviceRates(4e13, 3e12, 80_000_000_000, 1e-5)
    assert calibration.rates["slow:0"].memory_bytes is None
    assert calibration.link == LinkRates(5e10, 0.0)
    assert calibration.costs(Model()).label == "predicted for 2 x fast + 1 x slow (cluster.toml)"
    mixed = GOOD.replace("{ fast = 2, slow = 1 }", '["slow", "fast", "slow"]')
    assert load(tmp_path, mixed).devices == ("slow:0", "fast:0", "slow:1")


def test_one_of_each_kind_where_no_devices_are_listed(tmp_path):
    assert load(tmp_path, GOOD.replace("devices = { fast = 2, slow = 1 }", "")).devices == ("fast:0", "slow:0")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[link]", "[links]", "cluster.toml: links is unknown: use one of devices, device, link"),
        ("kernel_seconds", "kernels", "device.fast.kernels is unknown: use one of flops_per_second, bytes_per_second"),
        ("memory_bytes = 80e9", "memory_bytes = 0", "device.fast.memory_bytes is 0, wanted a number above 0"),
        ("= 1e-5", "= -1", "device.fast.kernel_seconds is -1, wanted a number of at least 0: correct it there"),
        ("= 4e13", "= '4e13'", "device.fast.flops_per_second is '4e13', wanted a number above 0: correct it there"),
        ("= 4e13", "= inf", "device.fast.flops_per_second is inf, wanted a number above 0: correct it there"),
        ("flops_per_second = 1e13", "", "device.slow.flops_per_second is missing: add it, a number above 0"),
        ("fast = 2,", "fast = 0,", "devices.fast is 0, wanted how many there are: write e.g. 8"),
        ("slow = 1", "other = 1", "devices has 'other', which is not described: add a section [device.other]"),
        ("{ fast = 2, slow = 1 }", "[]", "devices is [], wanted names or counts"),
        ("[link]", "[link", "cluster.toml: not TOML"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(InputError, match=re.escape(message)):
        load(tmp_path, GOOD.replace(old, new))


def test_a_file_without_devices_is_explained(tmp_path):
    with pytest.raises(InputError, match=r"no device is described: add a section \[device.NAME\]"):
        load(tmp_path, "")
    with pytest.raises(InputError, match=r"device.a is 3, wanted a section: write \[device.a\]"):
        load(tmp_path, "[device]\na = 3")


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(InputError, match=r"none.toml: No such file or directory: pass the path of a calibration"):
        Calibration.load(tmp_path / "none.toml")
