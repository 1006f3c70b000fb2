"""Groups of devices: what they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from mp_lstm.errors import InputError
from mp_lstm.planning.group import Group, group_shape, grouped, members, shape


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, 1), (1, 1)),
        ((4, None, 1), (4, 1)),
        ((4, None, 2), (2, 2)),
        ((None, 3, 1), (3, 1)),
        ((None, None, 2), (1, 2)),
        ((6, 3, 2), (3, 2)),
    ],
)
def test_sizes_that_are_not_given_follow(given: tuple[Any, Any, Any], expected: tuple[int, int]) -> None:
    assert group_shape(*given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3, None, 2), "devices_per_stage is 3, which model_parallel 2 does not divide: pass a multiple of it"),
        ((4, 3, 2), "devices_per_stage is 4, data_parallel 3 times model_parallel 2 is 6: leave devices_per_stage out"),
        ((0, None, 1), "devices_per_stage is 0, wanted at least 1: pass a positive number"),
        ((None, 1.5, 1), "data_parallel is 1.5, wanted an integer: pass a whole number of at least 1"),
        ((None, None, -1), "model_parallel is -1, wanted at least 1"),
    ],
)
def test_sizes_that_cannot_be(given: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        group_shape(*given)


def test_one_device_is_no_group() -> None:
    assert grouped(("a", "b"), 1, 1) == ("a", "b")
    assert (members("a"), shape("a")) == (("a",), (1, 1))


def test_consecutive_devices_are_grouped_and_may_hold_two_stages() -> None:
    groups = grouped(("a", "b", "c", "d", "a", "b"), 1, 2)
    assert groups == (Group(("a", "b"), 1, 2), Group(("c", "d"), 1, 2), Group(("a", "b"), 1, 2))
    assert [f"{group}" for group in groups[:2]] == ["a+b", "c+d"]
    assert (members(groups[1]), shape(groups[1])) == (("c", "d"), (1, 2))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("abc", "3 devices make no whole groups of data_parallel 2 times model_parallel 1: pass a multiple of 2"),
        ("abcc", "group c[+]c has a device twice: pass different devices for one stage"),
        ("abbc", "device b is in the groups a[+]b and b[+]c: two stages share all of their devices"),
        ("abba", "device b is in the groups a[+]b and b[+]a: two stages share all of their devices, in the same order"),
    ],
)
def test_devices_that_make_no_groups(devices: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        grouped(devices, 2, 1)
