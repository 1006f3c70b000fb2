"""Plans: what is chosen, what is checked, and the table as printed."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm import planning
from mp_lstm.errors import InputError
from mp_lstm.planning import (
    BucketPlan,
    Calibration,
    Cost,
    DeviceRates,
    LinkRates,
    Plan,
    make_plan,
    predict,
    row_splits,
)


class StandInLayer(NamedTuple):
    name: str
    kind: str
    cost: Callable[[int, int], Cost]
    chunkable: bool = True


class StandInModel(NamedTuple):
    rows: tuple[StandInLayer, ...]


def lstm(index, flops=1e6, parameters=1_280_000, **options):
    """A layer of `flops` operations a phase, row and step, of any number of parameters."""

    def cost(batch_size, time):
        work = flops * batch_size * time
        return Cost(work, work, work, parameters, 4 * parameters, 0, 1600 * batch_size * time)

    return StandInLayer(f"lstm {index}", "lstm", cost, **options)


MODEL = StandInModel(tuple(lstm(i) for i in range(1, 5)))
TWO = ("cpu:0", "cpu:1")


def costs_of(model=MODEL, flops=1.6e11):
    return Calibration(dict.fromkeys(TWO, DeviceRates(flops, 2.5e10))).costs(model)


def plan_of(model=MODEL, *, batch_size=20, lengths=(16, 64), devices=TWO, **options):
    return make_plan(model, batch_size=batch_size, lengths=lengths, devices=devices, **options)


# --- stages, partition and devices ---


def test_as_many_stages_as_help_at_most_one_for_each_row():
    assert plan_of().partition == (2, 2)
    assert plan_of(devices=range(3)).partition == (1, 2, 1)  # the ends fill and drain beside their own work
    assert plan_of(devices=range(9)).partition == (1, 1, 1, 1)
    assert plan_of(devices=range(9)).devices == (0, 1, 2, 3)


def test_fewer_stages_than_devices():
    plan = plan_of(devices=("cpu:1", "cpu:0", "cpu:2"), stages=2)
    assert (plan.partition, plan.devices) == ((2, 2), ("cpu:1", "cpu:0"))


def test_device_given_twice_holds_two_stages():
    plan = plan_of(devices=("cpu:3", "cpu:0", "cpu:3"), stages=3)
    assert plan.devices == ("cpu:3", "cpu:0", "cpu:3")
    assert plan.device_indices == (0, 1, 0)
    assert plan.schedule((16,)).devices == (0, 1, 0)


def test_devices_need_not_be_hashable():
    assert plan_of(devices=[{"id": 0}, {"id": 1}]).device_indices == (0, 1)


def test_partition_balances_the_work_not_the_rows():
    model = StandInModel((lstm(1), lstm(2), lstm(3), lstm(4, flops=3e6)))
    assert plan_of(model).partition == plan_of(model, partition="auto").partition == (3, 1)


def test_partition_by_hand():
    plan = plan_of(partition=np.array([1, 3]))
    assert plan.partition == (1, 3)
    assert plan.stages == (range(1), range(1, 4))


def test_partition_fixes_the_number_of_stages():
    assert plan_of(devices=range(4), partition=(1, 3)).devices == (0, 1)


# --- buckets and chunks ---


def test_lengths_in_any_order_and_repeated():
    assert list(plan_of(lengths=(64, np.int64(16), 64, 32)).buckets) == [16, 32, 64]


def test_bucket_for_is_the_smallest_that_fits():
    plan = plan_of(lengths=(16, 32, 64))
    assert [plan.bucket_for(length).length for length in (0, 1, 16, 17, 64)] == [16, 16, 16, 32, 64]


def test_chunk_by_hand_is_a_slice_length():
    """Shorter buckets are one chunk; a bucket it does not divide runs at the next multiple."""
    plan = plan_of(lengths=(8, 16, 20, 64), chunk=16)
    assert [(bucket.chunk, bucket.chunks) for bucket in plan.buckets.values()] == [(8, 1), (16, 1), (16, 2), (16, 4)]


def test_microbatches_by_hand():
    bucket = plan_of(batch_size=20, lengths=(16,), microbatches=3, chunk=8).buckets[16]
    assert bucket == BucketPlan(length=16, chunk=8, chunks=2, microbatches=3, rows_per_microbatch=7)


def test_chosen_chunks_are_the_fastest_of_one_to_eight():
    costs = costs_of()
    fastest = predict(plan_of(lengths=(60,), costs=costs), MODEL, costs, 60).makespan
    for chunk in {-(-60 // chunks) for chunks in range(1, 9)}:
        assert predict(plan_of(lengths=(60,), chunk=chunk, costs=costs), MODEL, costs, 60).makespan >= fastest


def test_heavy_weights_are_read_seldom():
    """The work is the same, only the bytes of the weights differ, and every chunk reads them again."""
    light = StandInModel(tuple(lstm(i, parameters=1000) for i in range(4)))
    heavy = StandInModel(tuple(lstm(i, parameters=20_000_000) for i in range(4)))
    assert plan_of(light, lengths=(64,)).buckets[64].chunks == 8
    assert plan_of(heavy, lengths=(64,)).buckets[64].chunks == 1


def test_stages_on_one_device_need_no_chunks():
    assert plan_of(devices=("cpu:0", "cpu:0"), lengths=(64,)).buckets[64].chunks == 1


def test_one_stage_is_serial_unless_it_is_cut():
    assert plan_of(devices=("cpu:0",)).schedule_name == "serial"
    assert plan_of(devices=("cpu:0",), chunk=8).schedule_name == "wavefront"
    assert plan_of(devices=("cpu:0",), microbatches=2).schedule_name == "wavefront"
    assert plan_of(microbatches=1).schedule_name == "wavefront"


def test_serial_and_what_cannot_be_cut_have_one_chunk():
    bidirectional = StandInModel((*MODEL.rows[:3], lstm(4, chunkable=False)))
    for plan in (plan_of(schedule="serial"), plan_of(bidirectional)):
        assert [bucket.chunks for bucket in plan.buckets.values()] == [1, 1]


def test_bucket_of_one_step():
    assert plan_of(lengths=(1,)).buckets[1] == BucketPlan(1, 1, 1, 1, 20)


@given(st.integers(1, 50), st.integers(1, 50))
def test_row_splits_are_even_and_complete(batch_size, microbatches):
    microbatches = min(microbatches, batch_size)
    splits = row_splits(batch_size, microbatches)
    rows = [row for first, last in splits for row in range(first, last)]
    assert rows == list(range(batch_size))
    sizes = [last - first for first, last in splits]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == plan_of(batch_size=batch_size, microbatches=microbatches).buckets[16].rows_per_microbatch


# --- schedules of windows ---


def test_window_joins_the_microbatches_of_its_batches():
    plan = plan_of(lengths=(16, 64), chunk=16, microbatches=2, schedule="wavefront")
    schedule = plan.schedule((64, 16))
    assert schedule.chunks == (4, 4, 1, 1)
    assert schedule.name == "wavefront"


def test_schedule_is_built_once():
    plan = plan_of(lengths=(16, 32), chunk=32)
    assert plan.schedule((16, 32)) is plan.schedule([32, 16])  # cut alike


def test_serial_window_runs_batches_one_after_another():
    assert plan_of(schedule="serial").schedule((64, 16)).chunks == (1, 1)


def test_schedule_is_validated():
    """A user's own generator that forgets a task is found before anything runs."""
    from mp_lstm.planning import Schedule, serial

    def forgetful(devices, chunks, *, defer=None):
        whole = serial(devices, chunks)
        return Schedule("forgetful", whole.devices, whole.chunks, whole.tasks[:-1], whole.defer)

    with pytest.raises(InputError, match="schedule 'forgetful' lacks U of stage 1: add it"):
        plan_of(schedule=forgetful, chunk=64, lengths=(64,), stages=2).schedule((64,))


# --- prediction ---


def test_prediction_adds_up():
    """Two stages, two chunks: F F | F ... as in the timetable, with seconds worked out by hand."""
    below = lstm(1, flops=1.0, parameters=10)
    # The loss of the last stage goes nowhere: the gradient sent down is as large as what came up.
    last = below._replace(cost=lambda batch_size, time: below.cost(batch_size, time)._replace(transfer_bytes=4))
    model = StandInModel((below, last))
    plan = plan_of(model, batch_size=1, lengths=(4,), chunk=2, partition=(1, 1), schedule="wavefront")
    rates = DeviceRates(flops_per_second=1.0, bytes_per_second=40.0, kernel_seconds=0.0)
    costs = Calibration(dict.fromkeys(TWO, rates), LinkRates(3200.0, 0.0)).costs(model)
    timeline = predict(plan, model, costs, 4)
    # F = B = 2 operations + 40 bytes of weights = 3 s, W = 4 + 80/40 = 6 s, U = 280/40 = 7 s, a transfer 1 s.
    # Stage 1 starts at 3+1, works 4 units until 16; B0 reaches stage 0 at 17, which does B0, W and U until 33.
    # The norm of stage 0, four bytes, reaches stage 1 a little later still.
    assert timeline.makespan == pytest.approx(17 + 3 + 6 + 7 + 4 / 3200)
    assert timeline.busy == pytest.approx({0: 4 * 3 + 6 + 7, 1: 4 * 3 + 6 + 7})


def test_faster_devices_take_less_time():
    plan = plan_of()
    slow, fast = (predict(plan, MODEL, costs_of(flops=flops), 64).makespan for flops in (1e11, 1e13))
    assert fast < slow


def test_balanced_partition_is_predicted_to_be_faster():
    even, skewed = plan_of(partition=(2, 2)), plan_of(partition=(1, 3))
    assert predict(even, MODEL, costs_of(), 64).makespan < predict(skewed, MODEL, costs_of(), 64).makespan


# --- the plan as a value ---


def test_printed_plan():
    model = StandInModel(
        (
            StandInLayer("embed", "embedding", lambda batch_size, time: Cost(0, 0, 0, 2_000_000, 0, 0, 0)),
            *(lstm(i) for i in (1, 2)),
            StandInLayer("head", "head", lstm(0, flops=2e6, parameters=4_010_000).cost),
        )
    )
    plan = plan_of(model, lengths=(8, 60), chunk=16, microbatches=3, schedule="wavefront")
    assert "\n" + str(plan) + "\n" == dedent("""
        stage  device  row     kind       parameters   share
            0  cpu:0   embed   embedding   2,000,000    0.0%
            0  cpu:0   lstm 1  lstm        1,280,000   25.0%
            0  cpu:0   lstm 2  lstm        1,280,000   25.0%
            1  cpu:1   head    head        4,010,000   50.0%
                       total               8,570,000  100.0%

        bucket  chunk  chunks  micro-batches  rows each  schedule
             8      8       1              3          7  wavefront
            60     16       4              3          7  wavefront
        """)


def test_plans_compare_by_value_and_cannot_be_changed():
    plan = plan_of()
    plan.schedule((16,))
    assert plan == plan_of()
    assert hash(plan) == hash(plan_of())
    with pytest.raises(FrozenInstanceError):
        plan.batch_size = 3


def test_model_without_work_has_no_shares():
    model = StandInModel((StandInLayer("silent", "none", lambda batch_size, time: Cost(0, 0, 0, 0, 0, 0, 0)),) * 2)
    assert [row.share for row in plan_of(model).rows] == [0.0, 0.0]


# --- messages ---

HALF = StandInModel((lstm(1), lstm(2, chunkable=False)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, wanted at least 1: pass a positive number"),
        ({"batch_size": 2.5}, "batch_size is 2.5, wanted an integer: pass a whole number of at least 1"),
        ({"lengths": ()}, "lengths is empty, wanted the buckets' lengths: pass e.g. lengths=(16, 32, 64)"),
        ({"lengths": 8}, "lengths is 8, wanted a sequence: pass e.g. lengths=(16, 32, 64)"),
        ({"devices": 2}, "devices is 2, wanted a sequence: pass e.g. devices=jax.devices()"),
        ({"lengths": (16, 0)}, "lengths[1] is 0, wanted at least 1: pass a positive number"),
        ({"devices": ()}, "devices is empty, wanted one for each stage: pass e.g. devices=jax.devices()"),
        ({"stages": 0}, "stages is 0, wanted at least 1: pass a positive number"),
        ({"stages": 5}, "5 stages for a model of 4 placement rows: pass at most stages=4"),
        (
            {"stages": 3},
            "3 stages for 2 devices: pass one device for each stage, a device may be there twice",
        ),
        (
            {"partition": (1, 1, 2)},
            "3 stages for 2 devices: pass one device for each stage, a device may be there twice",
        ),
        (
            {"partition": (1, 3), "stages": 1},
            "stages is 1, partition has 2: leave stages out, or pass 2",
        ),
        ({"partition": (2, 3)}, "partition gives 5 layers (2+3), the model has 4: pass partition=(2, 2) or 'auto'"),
        ({"partition": "even"}, "partition is 'even', wanted the number of layers of each stage"),
        (
            {"schedule": "wavefornt"},
            "schedule 'wavefornt' is unknown: did you mean 'wavefront'? pass one of 'serial', 'wavefront'",
        ),
        ({"schedule": "x"}, "schedule 'x' is unknown: pass one of 'serial', 'wavefront'"),
        ({"remat": "all"}, "remat is 'all', wanted one of 'none', 'head', 'layer', 'stage', or None: pass 'none'"),
        (
            {"remat": "head"},
            "remat is 'head', but no row has a softmax head: pass 'none', 'layer' or 'stage'",
        ),
        ({"memory_limit": 0}, "memory_limit is 0, wanted bytes above 0: pass e.g. 16e9, or None"),
        ({"weights": {17: 1}}, "weights has length 17, the buckets are 16, 64: leave it out"),
        ({"weights": {16: -1}}, "weights[16] is -1, wanted at least 0: pass e.g. how many batches"),
        ({"weights": {16: 0}}, "weights are all 0, wanted how often each bucket occurs"),
        ({"pins": {"lstm 9": "cpu:0"}}, "pins has 'lstm 9', no row has this name: pass a row's index, 0 to 3"),
        ({"pins": {4: "cpu:0"}}, "pins has row 4, the model has 4: pass 0 to 3"),
        ({"pins": {0: "tpu"}}, "pins puts row 0 on tpu, which is not in devices: pass one that is"),
        (
            {"pins": {0: "cpu:1", 3: "cpu:0"}},
            "pins leave no place for some rows: a pinned row needs a stage on its device, and stages follow the order",
        ),
        (
            {"schedule": "serial", "chunk": 8},
            "schedule 'serial' runs a batch uncut, chunk is 8: leave chunk out, or pass schedule='wavefront'",
        ),
        (
            {"schedule": "serial", "microbatches": 2},
            "schedule 'serial' runs a batch uncut, microbatches is 2: leave microbatches out, "
            "or pass schedule='wavefront'",
        ),
        ({"chunk": 65}, "chunk is 65 time steps, the longest bucket has 64: pass at most chunk=64"),
        ({"chunk": 0}, "chunk is 0, wanted at least 1: pass a positive number"),
        (
            {"model": HALF, "chunk": 8},
            "chunk is 8, but row 'lstm 2' cannot be cut in time: leave chunk out, use microbatches to overlap",
        ),
        ({"microbatches": 21}, "microbatches is 21, the batch has 20 rows: pass at most microbatches=20"),
        ({"microbatches": 0}, "microbatches is 0, wanted at least 1: pass a positive number"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        plan_of(**arguments)


def test_too_long_a_length_names_the_longest_bucket():
    message = "length 70 fits no bucket, the longest is 64: cut the text, or plan with 70 in lengths"
    with pytest.raises(InputError, match=message):
        plan_of().bucket_for(70)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((16, 17), "no bucket has length 17, this plan has 16, 64: pad the batch to one of them"),
        (16, "lengths is 16, the bucket length of each batch is wanted: pass e.g. (16,)"),
        ((), "a window got no batches: pass the bucket length of at least one, e.g. (32,)"),
    ],
)
def test_wrong_windows_are_explained(lengths, message):
    with pytest.raises(InputError, match=re.escape(message)):
        inspect.unwrap(Plan.schedule)(plan_of(), lengths)


def test_planning_never_imports_jax():
    """Room by room: the package's own __init__ is left out, as it imports every room."""
    root = Path(planning.__file__).parent.parent
    code = dedent(f"""
        import sys, types
        package = types.ModuleType("mp_lstm")
        package.__path__ = [{str(root)!r}]
        sys.modules["mp_lstm"] = package
        import mp_lstm.planning
        assert "jax" not in sys.modules
        """)
    subprocess.run([sys.executable, "-c", code], check=True)
