"""Costs of stages that are groups of devices, from what the same work costs on one device.

A simple model, and labelled as one. Each device does a task on its share of the rows. Rows that the vocabulary is part
of (`DIVIDED`) do it on their share of that too: of parameters, of logits and of the time, but what goes in and comes
out is whole. The others are done by all of a group that share rows, each for itself. After every W the gradients are
added up over data: each device sends and takes 2 (data - 1) / data of their bytes. Left out are what the devices of a
group wait for one another, and the second gradient that each holds while it adds them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mp_lstm.planning.costs import CostModel, Kind, RowMemory, Seconds
from mp_lstm.planning.group import Group, members, shape

if TYPE_CHECKING:
    from mp_lstm.planning.plan import Plan

DIVIDED = ("embedding", "head")
"""Kinds of rows whose parameters lie in parts along the vocabulary."""


class GroupedCosts:
    """Costs by group: a `CostModel` whose devices are groups.

    Args:
      costs: of single devices.
      kinds: of each placement row.
      groups: of all stages.

    Example:
      >>> from collections import namedtuple
      >>> from mp_lstm.planning import Cost, default_calibration
      >>> cost = lambda rows, time: Cost(1e9 * rows, 1e9 * rows, 1e9 * rows, 0, 0, 0, 0)
      >>> model = namedtuple("Model", "rows")([namedtuple("Layer", "cost")(cost)])
      >>> alone = default_calibration().costs(model)
      >>> pair = Group(("cpu:0", "cpu:1"), data=2, model=1)
      >>> costs = GroupedCosts(alone, ("lstm",), (pair,))
      >>> alone.seconds("F", 0, 20, 8, "cpu:0").alone / costs.seconds("F", 0, 20, 8, pair).alone
      2.0
    """

    def __init__(self, costs: CostModel, kinds: Sequence[str], groups: Sequence[Any]):
        self._costs, self._kinds, self._groups = costs, tuple(kinds), tuple(groups)
        self._data, self._model = shape(groups[0])
        devices = dict.fromkeys(device for group in groups for device in members(group))
        self._of_host = Counter(costs.host(device) for device in devices)

    @property
    def label(self) -> str:
        """Where the numbers come from."""
        return f"{self._costs.label}, divided among {self._data} x {self._model} devices a stage (data x model)"

    def seconds(self, kind: Kind, row: int, rows: int, time: int, device: Any) -> Seconds:
        """Time of a row's task on a group."""
        first = members(device)[0]
        alone, shared = self._costs.seconds(kind, row, self._rows(rows), time, first)
        # A group that runs alone keeps as many of its host's devices busy as it has.
        others = self._of_host[self._costs.host(first)] - 1
        alone += (shared - alone) * (len(members(device)) - 1) / others if others else 0.0
        parts = self._model if self._kinds[row] in DIVIDED and (kind == "U" or self._kinds[row] == "head") else 1
        summed = self._sum_seconds(row, rows, time, device) if kind == "W" else 0.0
        return Seconds(alone / parts + summed, shared / parts + summed)

    def overhead(self, device: Any) -> float:
        """Seconds that a task costs beside its rows."""
        return self._costs.overhead(members(device)[0])

    def transfer(self, nbytes: int, source: Any, target: Any) -> float:
        """Seconds until what is `nbytes` in the whole has reached another group: each device sends its rows' part."""
        return self._costs.transfer(-(-nbytes // self._data), members(source)[0], members(target)[0])

    def memory(self, row: int, rows: int, time: int) -> RowMemory:
        """Bytes of a placement row on each device of a group."""
        held = self._costs.memory(row, self._rows(rows), time)
        # What a stage sends is counted in the whole: `transfer` divides it, and the next stage's device has its part.
        if self._kinds[row] not in DIVIDED or self._model == 1:
            return held
        names = ("parameters", "state", "largest", "scratch_weight")
        if self._kinds[row] == "head":
            names += ("scratch_forward", "scratch_backward")  # logits
            names += () if row in self.lean_rows else ("kept", "saved")  # errors
        return held._replace(**{name: -(-getattr(held, name) // self._model) for name in names})

    def capacity(self, device: Any) -> int | None:
        """Bytes of the least of a group's devices; None: unknown."""
        known = [size for size in map(self._costs.capacity, members(device)) if size is not None]
        return min(known, default=None)

    def host(self, device: Any) -> Any:
        """The host of a group's first device."""
        return self._costs.host(members(device)[0])

    @property
    def lean_rows(self) -> frozenset[int]:
        """Rows whose costs are those of their lean variants."""
        return self._costs.lean_rows

    def lean(self) -> GroupedCosts:
        """The same of lean rows."""
        costs = self._costs.lean()
        return self if costs is self._costs else GroupedCosts(costs, self._kinds, self._groups)

    def _rows(self, rows: int) -> int:
        return -(-rows // self._data)

    def _sum_seconds(self, row: int, rows: int, time: int, device: Any) -> float:
        """Seconds to add up a row's gradients over data."""
        if self._data == 1:
            return 0.0
        nbytes = self.memory(row, rows, time).parameters
        first, *_, last = members(device)
        return self._costs.transfer(2 * nbytes * (self._data - 1) // self._data, first, last) if nbytes else 0.0


def costs_of(plan: Plan, costs: CostModel) -> CostModel:
    """The costs by which a plan is predicted: those given, of rows as its remat runs them, divided among its groups."""
    costs = costs if plan.remat == "none" else costs.lean()
    if isinstance(costs, GroupedCosts) or not isinstance(plan.devices[0], Group):
        return costs
    return GroupedCosts(costs, [row.kind for row in plan.rows], plan.devices)
