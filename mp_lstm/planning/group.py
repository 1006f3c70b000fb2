"""Devices of one stage: one, or a group that works on it together, as a mesh of rows of the batch and of vocabulary.

data 2, model 2      vocabulary, first half   second half
first rows           devices[0]               devices[1]
last rows            devices[2]               devices[3]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

from mp_lstm.errors import InputError
from mp_lstm.planning.checks import positive


class Group(NamedTuple):
    """The devices of a stage that has several.

    Args:
      devices: data times model of them, those with the same rows of the batch next to one another.
      data: parts into which the rows of a micro-batch are divided.
      model: parts into which the vocabulary is divided.

    Example:
      >>> print(Group(("cpu:0", "cpu:1"), data=2, model=1))
      cpu:0+cpu:1
    """

    devices: tuple[Any, ...]
    data: int
    model: int

    def __str__(self) -> str:
        return "+".join(map(str, self.devices))


def members(place: Any) -> tuple[Any, ...]:
    """The devices of a stage, which is on a group or on one device.

    Example:
      >>> members(Group(("cpu:0", "cpu:1"), 2, 1)), members("cpu:0")
      (('cpu:0', 'cpu:1'), ('cpu:0',))
    """
    return place.devices if isinstance(place, Group) else (place,)


def shape(place: Any) -> tuple[int, int]:
    """Parts of the rows, and of the vocabulary, of a stage: (1, 1) on one device.

    Example:
      >>> shape(Group(("cpu:0", "cpu:1"), data=2, model=1)), shape("cpu:0")
      ((2, 1), (1, 1))
    """
    return (place.data, place.model) if isinstance(place, Group) else (1, 1)


def group_shape(
    devices_per_stage: SupportsIndex | None, data_parallel: SupportsIndex | None, model_parallel: SupportsIndex
) -> tuple[int, int]:
    """Checks the sizes of a group: parts of the rows, and of the vocabulary.

    Args:
      devices_per_stage: their product; None: whatever it is.
      data_parallel: None: `devices_per_stage` by `model_parallel`, or 1.
      model_parallel: of the vocabulary.

    Raises:
      InputError: a size is not positive, or the product is another.

    Example:
      >>> group_shape(4, None, 2), group_shape(None, None, 2)
      ((2, 2), (1, 2))
    """
    model = positive("model_parallel", model_parallel)
    size = None if devices_per_stage is None else positive("devices_per_stage", devices_per_stage)
    if data_parallel is None:
        if size is not None and size % model:
            raise InputError(
                f"devices_per_stage is {size}, which model_parallel {model} does not divide: pass a multiple of it"
            )
        return (1 if size is None else size // model), model
    data = positive("data_parallel", data_parallel)
    if size not in (None, data * model):
        raise InputError(
            f"devices_per_stage is {size}, data_parallel {data} times model_parallel {model} is {data * model}: leave "
            "devices_per_stage out, or pass that"
        )
    return data, model


def grouped(devices: Sequence[Any], data: int, model: int) -> tuple[Any, ...]:
    """The devices of each stage: as they are, or in consecutive groups.

    Args:
      devices: in order.
      data, model: parts of the rows and of the vocabulary.

    Raises:
      InputError: the devices make no whole number of groups; a device is twice in one, or in two different ones.

    Example:
      >>> [str(group) for group in grouped(("cpu:0", "cpu:1", "cpu:2", "cpu:3"), 2, 1)]
      ['cpu:0+cpu:1', 'cpu:2+cpu:3']
    """
    size = data * model
    if size == 1:
        return tuple(devices)
    if len(devices) % size:
        raise InputError(
            f"{len(devices)} devices make no whole groups of data_parallel {data} times model_parallel {model}: pass a "
            f"multiple of {size} devices"
        )
    groups = [Group(tuple(devices[i : i + size]), data, model) for i in range(0, len(devices), size)]
    where: dict[Any, Group] = {}
    for group in groups:
        if len(set(group.devices)) < size:
            raise InputError(f"group {group} has a device twice: pass different devices for one stage")
        for device in group.devices:
            if where.setdefault(device, group) != group:
                raise InputError(
                    f"device {device} is in the groups {where[device]} and {group}: two stages share all of their "
                    "devices, in the same order, or none"
                )
    return tuple(groups)
