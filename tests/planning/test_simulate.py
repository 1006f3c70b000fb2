"""Simulated steps: the textbook formulas in the uniform case, and bounds that hold in every case."""

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.errors import InputError
from mp_lstm.planning import dependencies, serial, simulate, validate, wavefront

devices_strategy = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)
chunks_strategy = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
seconds_strategy = st.floats(0.01, 10)


def uniform(**seconds):
    return lambda task: seconds[task.kind]


@given(st.integers(1, 5), chunks_strategy, seconds_strategy, seconds_strategy, seconds_strategy, seconds_strategy)
def test_idle_share_of_wavefront_is_the_textbook_one(stages, chunks, F, B, W, U):
    """N units in all, M micro-batches: (S-1)(F+B) / ((N+S-1)(F+B) + M W + U), with S stages on S devices.

    For micro-batches of C chunks N = C M; for M = 1 it is the formula of one batch cut into chunks.
    """
    units, microbatches = sum(chunks), len(chunks)
    timeline = simulate(wavefront(range(stages), chunks), uniform(F=F, B=B, W=W, U=U))
    step = (units + stages - 1) * (F + B) + microbatches * W + U
    assert timeline.makespan == pytest.approx(step)
    for idle in timeline.idle.values():
        assert idle == pytest.approx((stages - 1) * (F + B) / step, abs=1e-9)


@given(st.integers(1, 5), seconds_strategy, seconds_strategy, seconds_strategy, seconds_strategy)
def test_serial_step_is_one_stage_after_another(stages, F, B, W, U):
    """S (F + B) down to stage 0, whose W ends last, then U."""
    timeline = simulate(serial(range(stages), (1,)), uniform(F=F, B=B, W=W, U=U))
    assert timeline.makespan == pytest.approx(stages * (F + B) + W + U)


@st.composite
def cases(draw):
    """A schedule, random seconds of its tasks, and random seconds of transfers."""
    devices, chunks = draw(devices_strategy), draw(chunks_strategy)
    if draw(st.booleans()):
        schedule = wavefront(devices, chunks, defer=draw(st.none() | st.integers(1, 4)))
    else:
        schedule = serial(devices, (1,) * len(chunks))
    rng = random.Random(draw(st.integers(0, 2**32)))
    times = {task: rng.choice([0.0, rng.random(), 10 * rng.random()]) for task in schedule.tasks}
    sent = {(task, stage): rng.random() for task in schedule.tasks for stage in range(len(devices))}
    return schedule, times, lambda task, from_stage, to_stage: sent[task, to_stage]


def critical_path(schedule, times, transfer):
    """Longest path through the dependencies, however many devices there are. Recursive, so written apart."""
    known = {}

    def end(task):
        if task not in known:
            known[task] = times[task] + max((arrival(need, task) for need in dependencies(schedule, task)), default=0.0)
        return known[task]

    def arrival(need, task):
        apart = schedule.devices[need.stage] != schedule.devices[task.stage]
        return end(need) + (transfer(need, need.stage, task.stage) if apart else 0.0)

    return max(end(task) for task in schedule.tasks)


@given(cases())
def test_bounds_hold_for_any_times(case):
    schedule, times, transfer = case
    validate(schedule)
    timeline = simulate(schedule, times, transfer=transfer)
    assert set(timeline.end) == set(schedule.tasks)
    assert timeline.makespan >= critical_path(schedule, times, transfer) - 1e-9
    assert timeline.makespan >= max(timeline.busy.values()) - 1e-9
    for device, share in timeline.idle.items():
        assert share == pytest.approx(1 - timeline.busy[device] / timeline.makespan if timeline.makespan else 0.0)


@given(cases())
def test_devices_do_one_task_at_a_time_and_wait_for_what_they_need(case):
    schedule, times, transfer = case
    timeline = simulate(schedule, times, transfer=transfer)
    for device, order in schedule.by_device().items():
        assert timeline.busy[device] == pytest.approx(sum(times[task] for task in order))
        for task, follower in pairwise(order):
            assert timeline.end[task] <= timeline.start[follower]
    for task in schedule.tasks:
        assert timeline.end[task] == timeline.start[task] + times[task]
        for need in dependencies(schedule, task):
            apart = schedule.devices[need.stage] != schedule.devices[task.stage]
            delay = transfer(need, need.stage, task.stage) if apart else 0.0
            assert timeline.end[need] + delay <= timeline.start[task]


def test_transfers_delay_the_receiver_alone():
    schedule = wavefront((0, 1), (2,))
    plain = simulate(schedule, uniform(F=1.0, B=1.0, W=1.0, U=1.0))
    slow = simulate(schedule, uniform(F=1.0, B=1.0, W=1.0, U=1.0), transfer=lambda task, a, b: 0.5)
    assert slow.makespan == plain.makespan + 3 * 0.5  # the first F up, the last B down, the norm up
    assert slow.busy == plain.busy


def test_transfer_is_asked_for_what_crosses_devices_only():
    asked = []

    def transfer(task, from_stage, to_stage):
        asked.append((str(task), from_stage, to_stage))
        return 0.0

    simulate(wavefront((0, 0, 1), (1,)), uniform(F=1.0, B=1.0, W=1.0, U=1.0), transfer=transfer)
    assert asked == [
        ("F0.0 of stage 1", 1, 2),
        ("B0.0 of stage 2", 2, 1),
        ("W0 of stage 2", 2, 0),  # the norms
        ("W0 of stage 0", 0, 2),
        ("W0 of stage 1", 1, 2),
        ("W0 of stage 2", 2, 1),
    ]


def test_stages_of_one_device_take_turns():
    """Two stages on one device cost what one stage of twice the work does."""
    timeline = simulate(wavefront((0, 0), (3,)), uniform(F=1.0, B=2.0, W=3.0, U=1.0))
    assert timeline.makespan == timeline.busy[0] == 2 * (3 * 1.0 + 3 * 2.0 + 3.0 + 1.0)
    assert timeline.idle == {0: 0.0}


def test_times_may_be_a_mapping():
    schedule = serial((0,), (1,))
    assert simulate(schedule, dict.fromkeys(schedule.tasks, 2.0)).makespan == 8.0


def test_step_of_no_time_is_never_idle():
    assert simulate(serial((0,), (1,)), lambda task: 0.0).idle == {0: 0.0}


def test_broken_order_is_named():
    schedule = serial((0,), (1,))
    message = "has U of stage 0 at position 0, before W0 of stage 0, which it needs: swap them"
    with pytest.raises(InputError, match=message):
        simulate(replace(schedule, tasks=schedule.tasks[::-1]), lambda task: 1.0)


def test_eight_stages_of_64_units_are_planned_at_once():
    begin = time.perf_counter()
    schedule = wavefront(range(8), (8,) * 8)
    validate(schedule)
    simulate(schedule, lambda task: 1.0)
    assert time.perf_counter() - begin < 0.5  # 20 ms on an idle core
