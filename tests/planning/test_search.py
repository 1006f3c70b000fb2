"""The search: against brute force, what each of its inputs decides, and its limits of time.

A little over 400 lines: all of it needs the same small machines and models.
"""

import re
import time
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mp_lstm
from mp_lstm.errors import InputError
from mp_lstm.planning import (
    SCHEDULES,
    Calibration,
    Cost,
    DeviceRates,
    LinkRates,
    Seconds,
    make_plan,
    predict,
    predicted_memory,
    wavefront,
)

FREE = LinkRates(1e30, 0.0)


class StandInLayer(NamedTuple):
    name: str
    cost: Callable[[int, int], Cost]
    kind: str = "lstm"
    chunkable: bool = True
    lean: Any = None


class StandInModel(NamedTuple):
    rows: tuple[StandInLayer, ...]


def layer(index, *, forward=1.0, backward=1.0, weight=1.0, parameters=0, saved=0, sent=0, inputs=0, lean=None):
    """A row of so many operations, saved, sent and input bytes for each batch row and time step.

    `lean`: what its lean variant has other numbers of; None: it has no such variant.
    """
    given = {"forward": forward, "backward": backward, "weight": weight, "parameters": parameters, "saved": saved}
    given |= {"sent": sent, "inputs": inputs}

    def cost(batch_size, time):
        units = batch_size * time
        work = (forward * units, backward * units, weight * units)
        return Cost(*work, parameters, 4 * parameters, saved * units, sent * units, input_bytes=inputs * units)

    return StandInLayer(f"row {index}", cost, lean=None if lean is None else layer(index, **given | lean))


def model_of(*rows):
    return StandInModel(tuple(layer(i, **options) for i, options in enumerate(rows)))


def machine(count, *, flops: Any = 1.0, memory: Any = None, overhead=0.0, link=FREE, byte_rate=1e30):
    """Devices of one operation a second, or of a list of rates, whose bytes cost nothing unless told otherwise."""
    rates = flops if isinstance(flops, list) else [flops] * count
    sizes = memory if isinstance(memory, list) else [memory] * count
    devices = {
        f"gpu:{i}": DeviceRates(rate, byte_rate, size, overhead)
        for i, (rate, size) in enumerate(zip(rates, sizes, strict=True))
    }
    return Calibration(devices, link)


def plan_of(model, calibration, *, batch_size=4, lengths=(8,), **options):
    costs = calibration.costs(model)
    return make_plan(model, batch_size=batch_size, lengths=lengths, devices=calibration.devices, costs=costs, **options)


def seconds_of(plan, model, costs):
    return np.mean([predict(plan, model, costs, length).makespan for length in plan.buckets])


def all_partitions(rows, stages):
    for cuts in combinations(range(1, rows), stages - 1):
        yield tuple(last - first for first, last in pairwise((0, *cuts, rows)))


# --- against brute force ---

REMATS = ("none", "head", "layer", "stage")
REMATS_OF_NONE_LEAN = ("none", "layer", "stage")

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "forward": st.integers(0, 9),
            "backward": st.integers(0, 9),
            "weight": st.integers(0, 9),
            "parameters": st.integers(0, 9),
            "saved": st.integers(0, 3),
            "sent": st.integers(0, 3),
            "inputs": st.integers(0, 2),
            "lean": st.sampled_from([None, None, {"saved": 0, "forward": 10}]),
        }
    ),
    min_size=1,
    max_size=10,
)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_partition_is_the_fastest_that_fits_of_all(data):
    """Unequal rows and devices, transfers, pins, memory: the same simulated time as trying every partition."""
    model = model_of(*data.draw(ROWS))
    rows = len(model.rows)
    stages = data.draw(st.integers(1, min(4, rows)))
    memory = data.draw(st.sampled_from([None, 400, 800]))
    rates = data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=stages, max_size=stages))
    calibration = machine(stages, flops=rates, memory=memory, overhead=0.5, link=LinkRates(2.0, 0.25), byte_rate=10.0)
    costs = calibration.costs(model)
    pins = data.draw(st.dictionaries(st.integers(0, rows - 1), st.sampled_from(calibration.devices), max_size=1))
    fixed = {
        "schedule": data.draw(st.sampled_from(list(SCHEDULES)[1:])),
        "chunk": data.draw(st.sampled_from([2, 3, 8])),
        "microbatches": data.draw(st.integers(1, 3)),
        "remat": data.draw(st.sampled_from(REMATS if any(row.lean for row in model.rows) else REMATS_OF_NONE_LEAN)),
    }

    times = []
    for partition in all_partitions(rows, stages):
        on = [device for device, size in zip(calibration.devices, partition, strict=True) for _ in range(size)]
        if all(on[row] == device for row, device in pins.items()):
            # The limit is left out here: this plan is only looked at.
            plan = plan_of(model, calibration_without_memory(calibration), partition=partition, **fixed)
            if memory is None or max(predicted_memory(plan, model, costs).values()) <= memory:
                times.append(seconds_of(plan, model, costs))
    if times:
        found = plan_of(model, calibration, stages=stages, pins=pins, **fixed)
        assert seconds_of(found, model, costs) == pytest.approx(min(times), rel=1e-6)
    else:
        with pytest.raises(InputError, match=r"no plan fits the memory|pins leave no place"):
            plan_of(model, calibration, stages=stages, pins=pins, **fixed)


def calibration_without_memory(calibration):
    return Calibration({name: rates._replace(memory_bytes=None) for name, rates in calibration.rates.items()}, FREE)


def test_everything_is_chosen_at_once():
    """Partition, schedule, chunks and micro-batches of two buckets: nothing that could be passed by hand is faster."""
    model = model_of({"forward": 3}, {}, {"weight": 4}, {"backward": 2})
    calibration = machine(2, overhead=6.0, link=LinkRates(5.0, 1.0))
    costs = calibration.costs(model)
    fastest = seconds_of(plan_of(model, calibration, lengths=(4, 8)), model, costs)
    for schedule in list(SCHEDULES)[1:]:
        for partition in (*all_partitions(4, 2), (4,)):
            for chunk in (1, 2, 3, 4, 8):
                for microbatches in (1, 2, 4):
                    fixed = {"partition": partition, "chunk": chunk, "microbatches": microbatches}
                    plan = plan_of(model, calibration, lengths=(4, 8), schedule=schedule, **fixed)
                    assert seconds_of(plan, model, costs) >= fastest * (1 - 1e-9)


class SharedCosts:
    """Costs where devices share one processor: everything takes half as long again beside a busy neighbour."""

    def __init__(self, costs):
        self._costs = costs

    def __getattr__(self, name):
        return getattr(self._costs, name)

    def seconds(self, kind, row, rows, time, device):
        alone = self._costs.seconds(kind, row, rows, time, device).alone
        return Seconds(alone, 1.5 * alone)

    def host(self, device):
        return "here"


def test_devices_that_share_a_processor_are_simulated():
    model = model_of({"forward": 3}, {}, {"weight": 4}, {"backward": 2})
    calibration = machine(2, overhead=1.0)
    costs: Any = SharedCosts(calibration.costs(model))
    fixed = {"batch_size": 4, "lengths": (8,), "devices": calibration.devices, "costs": costs, "schedule": "wavefront"}
    plan = make_plan(model, microbatches=1, **fixed)
    assert plan.choices[0].seconds == pytest.approx(predict(plan, model, costs, 8).makespan)
    every = [
        make_plan(model, microbatches=1, partition=partition, chunk=chunk, **fixed)
        for partition in (*all_partitions(4, 2), (4,))
        for chunk in (1, 2, 4, 8)
    ]
    assert seconds_of(plan, model, costs) <= min(seconds_of(other, model, costs) for other in every) * 1.02
    assert all(choice.seconds >= plan.choices[0].seconds * (1 - 1e-9) for choice in plan.choices)


# --- what each input decides ---


def test_memory_limit_decides():
    """The fast split does not fit the first device."""
    model = model_of(*[{"parameters": 100}] * 4, {"forward": 4, "backward": 4})
    free, tight = (plan_of(model, machine(2, memory=memory), stages=2) for memory in (None, [6000, 10**9]))
    assert free.partition == (4, 1)
    assert tight.partition == (3, 2)
    assert plan_of(model, machine(2), stages=2, memory_limit=6100).partition != (4, 1)
    assert predicted_memory(tight, model, machine(2).costs(model))[0] <= 6000


def test_transfer_cost_decides():
    """The even cut sends much: where that takes time, the narrow output is cut."""
    model = model_of({"sent": 1}, {"sent": 1000}, {"sent": 1000}, {"sent": 1000})
    fixed = {"stages": 2, "chunk": 2, "microbatches": 1}
    assert plan_of(model, machine(2), **fixed).partition == (2, 2)
    assert plan_of(model, machine(2, link=LinkRates(50.0, 0.0)), **fixed).partition == (1, 3)


def test_split_of_w_decides():
    """The same work, W on its own or within B: apart, nobody waits for it, and other rows go together."""
    phases = [(0, 1, 4), (1, 0, 3), (2, 4, 2)]
    apart = model_of(*({"forward": f, "backward": b, "weight": w} for f, b, w in phases))
    within = model_of(*({"forward": f, "backward": b + w, "weight": 0} for f, b, w in phases))
    fixed = {"schedule": "wavefront", "chunk": 2, "microbatches": 1}
    split, joined = (plan_of(model, machine(2), stages=2, **fixed) for model in (apart, within))
    assert (split.partition, joined.partition) == ((1, 2), (2, 1))
    for model, better, worse in ((apart, split, joined), (within, joined, split)):
        other = plan_of(model, machine(2), partition=worse.partition, **fixed)
        costs = machine(2).costs(model)
        assert seconds_of(better, model, costs) < 0.98 * seconds_of(other, model, costs)


def test_reading_weights_again_decides():
    """The work is the same: what many chunks cost is their weights."""
    light, heavy = (model_of(*[{"parameters": parameters}] * 4) for parameters in (0, 100))
    fixed = {"stages": 2, "microbatches": 1}
    assert plan_of(light, machine(2, byte_rate=100.0), **fixed).buckets[8].chunks == 8
    assert plan_of(heavy, machine(2, byte_rate=100.0), **fixed).buckets[8].chunks < 8


def test_weights_of_buckets_decide():
    """One partition serves all buckets: that of the commoner one is taken."""
    phases = [(1, 1, 2), (1, 1, 3), (3, 3, 2)]
    model = model_of(*({"forward": f, "backward": b, "weight": w} for f, b, w in phases))
    # One chunk, where W alone overlaps, or eight.
    fixed = {"lengths": (2, 16), "stages": 2, "microbatches": 1, "chunk": 2, "schedule": "wavefront"}
    for weights, partition in (({2: 1}, (1, 2)), ({16: 1}, (2, 1)), ({2: 1000, 16: 1}, (1, 2)), (None, (2, 1))):
        assert plan_of(model, machine(2), weights=weights, **fixed).partition == partition


def test_faster_device_gets_more_rows():
    model = model_of(*[{}] * 8)
    assert plan_of(model, machine(2, flops=[1.0, 3.0]), microbatches=1).partition[1] > 4
    assert plan_of(model, machine(2, flops=[3.0, 1.0]), microbatches=1).partition[0] > 4


def test_pins_hold():
    model = model_of(*[{}] * 6)
    for pins in ({"row 4": "gpu:0"}, {4: "gpu:0"}, {np.int64(4): "gpu:0", 5: "gpu:1"}):
        assert plan_of(model, machine(2), pins=pins).partition == (5, 1)


def test_fewer_devices_where_more_do_not_pay():
    model = model_of(*[{}] * 4)
    assert len(plan_of(model, machine(4, overhead=0.01)).partition) == 4
    assert len(plan_of(model, machine(4, overhead=1000.0)).partition) == 1


def test_own_schedule_is_used():
    def mine(devices, chunks, *, defer=None):
        return wavefront(devices, chunks, defer=1)

    plan = plan_of(model_of({}, {}), machine(2), schedule=mine)
    assert plan.schedule_name == "mine"
    assert plan.schedule((8,)).defer == 1


def test_remat_is_taken_where_only_it_fits():
    model = model_of(*[{"saved": 100, "inputs": 1, "sent": 1}] * 4)
    roomy, tight = machine(2), machine(2, memory=2000)
    assert plan_of(model, roomy, remat=None).remat == "none"
    plan = plan_of(model, tight, remat=None, microbatches=1)
    assert plan.remat == "layer"
    assert str(plan).endswith("remat: B recomputes F, by layer")
    with pytest.raises(InputError, match="remat='layer' or None"):
        plan_of(model, tight, microbatches=1)


def test_the_head_alone_computes_again_where_that_is_enough():
    """A vocabulary that is large beside all else: its errors do not fit, a block of logits does."""
    model = mp_lstm.language_model(vocab=20_000, embed=8, hidden=8, layers=1)
    fixed = {"batch_size": 20, "lengths": (64,), "devices": ("gpu:0",), "partition": (3,), "schedule": "serial"}

    def planned(memory, remat=None):
        costs = machine(1, flops=1e12, memory=memory).costs(model)
        return make_plan(model, costs=costs, remat=remat, **fixed)

    def peak(remat):
        plan = planned(None, remat)
        return predicted_memory(plan, model, machine(1).costs(model))[0]

    kept, lean = peak("none"), peak("head")
    assert 3 * lean < kept
    assert planned(kept).remat == "none"
    plan = planned(lean)
    assert plan.remat == "head"
    assert str(plan).endswith("remat: W computes the head's logits again, block by block")
    assert re.search("remat none +- +- +does not fit the memory$", plan.explain())
    with pytest.raises(InputError, match="remat='layer' or None"):
        planned(lean - 1, "head")


# --- the plan as a value ---


def test_equal_arguments_give_equal_plans():
    model = mp_lstm.language_model(vocab=100, embed=8, hidden=64, layers=3)
    options = {"batch_size": 8, "lengths": (8, 20), "devices": "abcd"}
    plans = [make_plan(model, **options) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].choices == plans[1].choices


def test_explanation_compares_and_gives_reasons():
    model = model_of(*[{}] * 4)
    plan = plan_of(model, machine(2, overhead=0.5))
    lines = plan.explain().splitlines()
    assert lines[0] == "predicted:"
    assert lines[1].split() == ["plan", "ms", "a", "step", "slower", "idle", "memory", "why", "not"]
    assert lines[2].endswith("chosen")
    whats = [choice.what for choice in plan.choices]
    assert {"1 stage", "schedule gpipe", "1 chunk", "4 micro-batches", "partition 3+1", "partition 1+3"} <= {*whats}
    assert all(choice.seconds >= plan.choices[0].seconds * (1 - 1e-9) for choice in plan.choices)
    assert "each device has more to do" in plan.explain()


def test_choices_are_those_that_are_predicted():
    model = model_of({"forward": 3}, {}, {"weight": 4}, {"saved": 2})
    calibration = machine(2, overhead=1.0, memory=10**6)
    plan, costs = plan_of(model, calibration, lengths=(4, 8)), calibration.costs(model)
    timelines = [predict(plan, model, costs, length) for length in (4, 8)]
    assert plan.choices[0].seconds == pytest.approx(np.mean([timeline.makespan for timeline in timelines]))
    assert plan.choices[0].work == pytest.approx(np.mean([sum(timeline.busy.values()) for timeline in timelines]))
    assert plan.choices[0].peak == max(predicted_memory(plan, model, costs).values())


def test_plan_by_hand_searches_nothing():
    class Asked:
        def __getattr__(self, name):
            if name == "capacity":
                return lambda device: None
            if name == "label":
                return "asked"
            raise AssertionError(name)

    asked: Any = Asked()
    fixed: Any = {"partition": (1, 1), "schedule": "wavefront", "chunk": 4, "microbatches": 1}
    plan = make_plan(model_of({}, {}), batch_size=4, lengths=(8,), devices="ab", costs=asked, **fixed)
    assert plan.explain() == "made by hand: nothing was compared"


# --- messages ---


def test_what_does_not_fit_is_explained():
    model = model_of(*[{"parameters": 1000}] * 3)
    # A row is (4 + 4 + 8) x 1000 bytes, and a gradient before it is added.
    message = (
        "no plan fits the memory: device gpu:0 would hold 16,000 bytes at least, 6,000 more than it may: pass "
        "more stages (devices), remat='layer' or None, a smaller batch_size or more microbatches"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        plan_of(model, machine(2, memory=[10_000, 30_000]))


def test_a_plan_of_another_model_is_explained():
    plan = plan_of(model_of({}, {}), machine(2))
    other = model_of({})
    with pytest.raises(InputError, match="the plan has 2 placement rows, the model 1: pass the model it was made for"):
        predict(plan, other, machine(2).costs(other), 8)


# --- limits of time: loose, since others may use the machine ---


def test_demo_is_planned_at_once():
    model = mp_lstm.language_model(vocab=10_000, embed=200, hidden=400, layers=8, dropout=0.5)
    begin = time.process_time()
    plan = make_plan(model, batch_size=20, lengths=(8, 16, 24, 32, 60), devices="ab")
    assert time.process_time() - begin < 2
    assert len(plan.partition) == 2


def test_48_layers_on_64_devices():
    model = mp_lstm.language_model(vocab=50_000, embed=8192, hidden=8192, layers=48)
    calibration = machine(
        64, flops=4e14, memory=80_000_000_000, overhead=1e-5, link=LinkRates(1e11, 5e-6), byte_rate=3e12
    )
    costs = calibration.costs(model)
    begin = time.process_time()
    plan = plan_of(model, calibration, batch_size=512, lengths=(256,))
    timeline, held = predict(plan, model, costs, 256), predicted_memory(plan, model, costs)
    assert time.process_time() - begin < 10
    assert max(held.values()) <= 80_000_000_000
    assert 0 < np.mean(list(timeline.idle.values())) < 1
    assert plan.choices[0].seconds == pytest.approx(timeline.makespan)


def test_1000_rows_in_64_stages():
    model = model_of(*[{"forward": 1 + i % 7} for i in range(1000)])
    calibration = machine(64, overhead=0.1)
    fixed = {"schedule": "wavefront", "chunk": 2, "microbatches": 1}
    begin = time.process_time()
    plan = plan_of(model, calibration, stages=64, **fixed)
    assert time.process_time() - begin < 5
    costs = calibration.costs(model)
    even = plan_of(model, calibration, partition=(*[16] * 40, *[15] * 24), **fixed)
    assert seconds_of(plan, model, costs) <= seconds_of(even, model, costs)
