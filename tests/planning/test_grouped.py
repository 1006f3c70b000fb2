"""Plans whose stages are groups of devices: what they cost, and how they are made and drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from mp_lstm.errors import InputError
from mp_lstm.planning import (
    Calibration,
    Cost,
    DeviceRates,
    Group,
    LinkRates,
    Plan,
    default_calibration,
    make_plan,
    predict,
    predicted_memory,
)
from mp_lstm.planning.costs import CostModel, Seconds
from mp_lstm.planning.grouped import GroupedCosts, costs_of

MEGA = 10**6
CPUS = tuple(f"cpu:{i}" for i in range(4))


class Layer(NamedTuple):
    name: str
    kind: str
    chunkable: bool = True
    lean: Any = None

    def cost(self, batch_size: int, time: int) -> Cost:
        """Every phase takes a millisecond a row and step at a gigaflop a second."""
        work, rows = 1e6 * batch_size * time, batch_size * time
        return Cost(
            work, work, work, MEGA, 0, 0, 4 * rows, kept_bytes=8 * rows, tape_bytes=16 * rows, input_bytes=4 * rows
        )


class Model(NamedTuple):
    rows: tuple[Layer, ...]


MODEL = Model((Layer("embed", "embedding"), Layer("lstm", "lstm"), Layer("head", "head")))
KINDS = [row.kind for row in MODEL.rows]


def alone() -> CostModel:
    """Computing alone takes time, and sending: a second for 4 megabytes."""
    rates = DeviceRates(1e9, 1e30, memory_bytes=10**9, kernel_seconds=0.0)
    return Calibration(dict.fromkeys(CPUS, rates), LinkRates(4e6, 0.0)).costs(MODEL)


def on(data: int, model: int) -> tuple[CostModel, Any]:
    group = Group(CPUS[: data * model], data, model)
    return GroupedCosts(alone(), KINDS, (group,)), group


def test_rows_are_divided_and_their_gradients_added_up() -> None:
    costs, group = on(data=2, model=1)
    for row in range(3):
        assert costs.seconds("F", row, 10, 4, group).alone == pytest.approx(0.02)
        assert costs.seconds("B", row, 5, 4, group).alone == pytest.approx(0.012)  # the larger part has 3
        assert costs.seconds("W", row, 10, 4, group).alone == pytest.approx(0.02 + 1.0)
        held, whole = costs.memory(row, 10, 4), alone().memory(row, 10, 4)
        assert (held.parameters, held.state) == (whole.parameters, whole.state)
        assert (held.kept, held.tape, held.input) == (whole.kept // 2, whole.tape // 2, whole.input // 2)
    assert costs.transfer(8 * MEGA, group, group) == pytest.approx(1.0)


def test_the_vocabulary_is_divided() -> None:
    costs, group = on(data=1, model=4)
    assert [costs.seconds("F", row, 10, 4, group).alone for row in range(3)] == pytest.approx([0.04, 0.04, 0.01])
    assert [costs.seconds("W", row, 10, 4, group).alone for row in range(3)] == pytest.approx([0.04, 0.04, 0.01])
    assert [costs.memory(row, 10, 4).parameters for row in range(3)] == [MEGA, 4 * MEGA, MEGA]
    assert [costs.memory(row, 10, 4).kept for row in range(3)] == [320, 320, 80]
    assert [costs.memory(row, 10, 4).input for row in range(3)] == [160] * 3


def test_a_lean_head_keeps_nothing_that_is_divided() -> None:
    """Its kept arrays are of steps, and not of the vocabulary."""
    head = Layer("head", "head", lean=Layer("head", "head"))
    model = Model((*MODEL.rows[:2], head))
    group = Group(CPUS, 1, 4)
    costs = GroupedCosts(Calibration(dict.fromkeys(CPUS, DeviceRates(1e9, 1e9))).costs(model), KINDS, (group,))
    lean = costs.lean()
    assert (costs.lean_rows, lean.lean_rows) == (frozenset(), {2})
    assert lean.lean() is lean
    assert lean.label == costs.label
    assert (costs.memory(2, 10, 4).kept, lean.memory(2, 10, 4).kept) == (80, 320)
    assert lean.memory(2, 10, 4).parameters == MEGA
    plan = make_plan(model, batch_size=5, lengths=(8,), devices=CPUS, model_parallel=2, remat="head")
    assert costs_of(plan, costs).lean_rows == {2}


def test_a_group_alone_keeps_some_of_its_host_busy() -> None:
    """Two of four devices that share a processor: a third of the way from alone to all busy."""

    class Shared:
        def seconds(self, *args: Any) -> Seconds:
            return Seconds(1.0, 4.0)

        def host(self, device: Any) -> str:
            return "here"

    groups = (Group(CPUS[:2], 2, 1), Group(CPUS[2:], 2, 1))
    costs = GroupedCosts(Shared(), KINDS, groups)
    assert costs.seconds("F", 0, 10, 4, groups[0]) == Seconds(2.0, 4.0)


def planned(**options: Any) -> Plan:
    return make_plan(MODEL, batch_size=5, lengths=(8,), **{"devices": CPUS, "data_parallel": 2, **options})


def test_a_plan_of_groups() -> None:
    plan = planned(partition=(2, 1), schedule="wavefront", chunk=4, microbatches=2)
    assert plan.devices == (Group(CPUS[:2], 2, 1), Group(CPUS[2:], 2, 1))
    assert plan.device_indices == (0, 1)
    assert plan.buckets[8].rows_per_microbatch == 4  # 3 rows, and one more for two parts
    text = str(plan)
    assert "    0  cpu:0+cpu:1  lstm   lstm        1,000,000   33.3%" in text
    assert "mesh of each stage: data 2 (parts of the rows), model 1 (parts of the vocabulary)" in text
    assert "mesh" not in str(planned(data_parallel=1))


def test_all_that_is_searched_is_of_groups() -> None:
    plan = planned(costs=alone(), microbatches=1)
    assert set(plan.devices) <= {Group(CPUS[:2], 2, 1), Group(CPUS[2:], 2, 1)}
    assert plan.label == "predicted, divided among 2 x 1 devices a stage (data x model)"
    assert all(bucket.rows_per_microbatch == 6 for bucket in plan.buckets.values())


def test_predictions_take_the_costs_of_devices_or_of_groups() -> None:
    plan, costs = planned(partition=(2, 1), schedule="serial"), alone()
    assert costs_of(plan, costs_of(plan, costs)) is not costs
    whole = planned(data_parallel=1, partition=(2, 1), schedule="serial")
    assert costs_of(whole, costs) is costs
    both = [predict(plan, MODEL, each, 8).makespan for each in (costs, costs_of(plan, costs))]
    assert both[0] == both[1]
    assert (
        predicted_memory(planned(data_parallel=None, model_parallel=2, partition=(2, 1)), MODEL, costs)[1]
        < (predicted_memory(whole, MODEL, costs)[1])
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": CPUS[:3]}, "3 devices make no whole groups of data_parallel 2"),
        ({"stages": 3}, "3 stages for 2 groups of devices: pass one group for each stage, a group may be there twice"),
        ({"pins": {"lstm": "cpu:0"}}, "pins puts row 'lstm' on cpu:0, which is not in devices"),
        ({"devices_per_stage": 3}, "devices_per_stage is 3, data_parallel 2 times model_parallel 1 is 2"),
    ],
)
def test_plans_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(**options)


def test_model_parallel_needs_a_vocabulary() -> None:
    model = Model((Layer("lstm", "lstm"), Layer("loss", "dense")))
    with pytest.raises(InputError, match=r"model_parallel is 2, but no row has a vocabulary \(embedding or head\)"):
        make_plan(model, batch_size=4, lengths=(8,), devices=CPUS, model_parallel=2)


def test_pins_take_a_group() -> None:
    plan = planned(pins={"head": Group(CPUS[2:], 2, 1)}, costs=default_calibration().costs(MODEL), stages=2)
    assert plan.devices[-1] == Group(CPUS[2:], 2, 1)
