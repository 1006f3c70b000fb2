"""Simulated steps: the textbook formulas in the uniform case, bounds that hold in every case, and shared processors."""

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.errors import InputError
from mp_lstm.planning import (
    SCHEDULES,
    dependencies,
    gpipe,
    one_f_one_b,
    serial,
    simulate,
    validate,
    wavefront,
    zero_bubble,
)
from mp_lstm.planning.costs import Seconds

devices_strategy = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)
chunks_strategy = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)
seconds_strategy = st.floats(0.01, 10)


def uniform(**seconds):
    return lambda task: seconds[task.kind]


# --- the textbook ---


@pytest.mark.parametrize("generate", [wavefront, gpipe])
@given(st.integers(1, 5), chunks_strategy, seconds_strategy, seconds_strategy, seconds_strategy, seconds_strategy)
def test_idle_share_is_the_textbook_one(generate, stages, chunks, F, B, W, U):
    """N units in all, M micro-batches: (S-1)(F+B) / ((N+S-1)(F+B) + M W + U), with S stages on S devices.

    For micro-batches of C chunks N = C M; for M = 1 it is the formula of one batch cut into chunks.
    """
    units, microbatches = sum(chunks), len(chunks)
    timeline = simulate(generate(range(stages), chunks), uniform(F=F, B=B, W=W, U=U))
    step = (units + stages - 1) * (F + B) + microbatches * W + U
    assert timeline.makespan == pytest.approx(step)
    for idle in timeline.idle.values():
        assert idle == pytest.approx((stages - 1) * (F + B) / step, abs=1e-9)


@given(st.integers(1, 5), chunks_strategy, seconds_strategy, seconds_strategy, seconds_strategy, seconds_strategy)
def test_idle_share_of_one_f_one_b_is_the_textbook_one(stages, chunks, F, B, W, U):
    """The formula of `wavefront`, for W that takes as much as the units it joins take W each."""
    units = sum(chunks)
    schedule = one_f_one_b(range(stages), chunks)
    timeline = simulate(schedule, lambda task: {"F": F, "B": B, "W": W * len(task.units), "U": U}[task.kind])
    step = (units + stages - 1) * (F + B) + units * W + U
    assert timeline.makespan == pytest.approx(step)
    for idle in timeline.idle.values():
        assert idle == pytest.approx((stages - 1) * (F + B) / step, abs=1e-9)


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b])
@given(st.integers(1, 5), st.integers(1, 5), seconds_strategy, seconds_strategy)
def test_idle_share_with_backward_in_one_piece(generate, stages, microbatches, F, B):
    """B and W together, and nothing to update: (S-1) / (M+S-1), as GPipe and PipeDream-Flush have it."""
    timeline = simulate(generate(range(stages), (1,) * microbatches), uniform(F=F, B=B, W=0.0, U=0.0))
    for idle in timeline.idle.values():
        assert idle == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-9)


@given(st.integers(1, 5), st.integers(1, 5), seconds_strategy, seconds_strategy)
def test_idle_share_of_zero_bubble_is_the_textbook_one(stages, microbatches, F, U):
    """ZB-H1 with F = B = W idles for (S-1)(F+B-W), where there are M >= S micro-batches; 1F1B for (S-1)(F+B).

    With fewer, no more than min(M, S) - 1 Ws find idle time: (S-1)(F+B) - (min(M,S)-1) W.
    """
    timeline = simulate(zero_bubble(range(stages), (1,) * microbatches), uniform(F=F, B=F, W=F, U=U))
    bubble = (stages - 1) * 2 * F - (min(microbatches, stages) - 1) * F
    step = 3 * F * microbatches + U + bubble
    assert timeline.makespan == pytest.approx(step)
    for idle in timeline.idle.values():
        assert idle == pytest.approx(bubble / step, abs=1e-9)


@given(st.integers(1, 5), seconds_strategy, seconds_strategy, seconds_strategy, seconds_strategy)
def test_serial_step_is_one_stage_after_another(stages, F, B, W, U):
    """S (F + B) down to stage 0, whose W ends last, then U."""
    timeline = simulate(serial(range(stages), (1,)), uniform(F=F, B=B, W=W, U=U))
    assert timeline.makespan == pytest.approx(stages * (F + B) + W + U)


# --- bounds ---


def random_times(tasks, seed):
    rng = random.Random(seed)
    return {task: rng.choice([0.0, rng.random(), 10 * rng.random()]) for task in tasks}


@st.composite
def cases(draw):
    """A schedule, random seconds of its tasks, and random seconds of transfers."""
    name, devices, chunks = draw(st.sampled_from(list(SCHEDULES))), draw(devices_strategy), draw(chunks_strategy)
    if name == "serial":
        chunks = (1,) * len(chunks)
    schedule = SCHEDULES[name](devices, chunks, defer=draw(st.none() | st.integers(1, 4)))
    seed = draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    # The norm of a stage takes the same way whichever of its Ws is the last.
    sent = {}
    for task in schedule.tasks:
        for stage in range(len(devices)):
            sent.setdefault((task if task.kind != "W" else task.stage, stage), rng.random())
    times = random_times(schedule.tasks, seed)
    return schedule, times, lambda task, _, stage: sent[task if task.kind != "W" else task.stage, stage]


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


@given(devices_strategy, chunks_strategy, st.none() | st.integers(1, 4), st.integers(0, 2**32))
def test_zero_bubble_is_never_slower_than_one_f_one_b(devices, chunks, defer, seed):
    classic = one_f_one_b(devices, chunks)
    times = random_times(classic.tasks, seed)
    schedule = zero_bubble(devices, chunks, defer=defer, times=times.__getitem__)
    validate(schedule)
    assert simulate(schedule, times).makespan <= simulate(classic, times).makespan + 1e-9


@given(devices_strategy, chunks_strategy, st.none() | st.integers(1, 4))
def test_zero_bubble_is_never_slower_where_all_units_are_alike(devices, chunks, defer):
    """Nor does it need to be told the times then."""

    def makespan(schedule):
        return simulate(schedule, lambda task: float(len(task.units) or 1)).makespan

    assert makespan(zero_bubble(devices, chunks, defer=defer)) <= makespan(one_f_one_b(devices, chunks))


# --- transfers, devices, times ---


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

    simulate(wavefront((0, 0, 1), (1, 1)), uniform(F=1.0, B=1.0, W=1.0, U=1.0), transfer=transfer)
    assert asked == [
        ("F0.0 of stage 1", 1, 2),
        ("F1.0 of stage 1", 1, 2),
        ("B0.0 of stage 2", 2, 1),
        ("B1.0 of stage 2", 2, 1),
        ("W1 of stage 2", 2, 0),  # the norms, sent by the last W of each stage
        ("W1 of stage 0", 0, 2),
        ("W1 of stage 1", 1, 2),
        ("W1 of stage 2", 2, 1),
    ]


def test_stages_of_one_device_take_turns():
    """Two stages on one device cost what one stage of twice the work does."""
    timeline = simulate(wavefront((0, 0), (3,)), uniform(F=1.0, B=2.0, W=3.0, U=1.0))
    assert timeline.makespan == timeline.busy[0] == 2 * (3 * 1.0 + 3 * 2.0 + 3.0 + 1.0)
    assert timeline.idle == {0: 0.0}


def test_times_may_be_a_mapping():
    schedule = serial((0,), (1,))
    assert simulate(schedule, dict.fromkeys(schedule.tasks, 2.0)).makespan == 8.0


def test_devices_of_their_own_hosts_take_the_time_they_take_alone():
    schedule = wavefront((0, 1), (2,))
    assert simulate(schedule, lambda task: Seconds(1.0, 9.0)) == simulate(schedule, lambda task: 1.0)


def test_step_of_no_time_is_never_idle():
    assert simulate(serial((0,), (1,)), lambda task: 0.0).idle == {0: 0.0}


def test_broken_order_is_named():
    schedule = serial((0,), (1,))
    message = "has U of stage 0 at position 0, before W0 of stage 0, which it needs: swap them"
    with pytest.raises(InputError, match=message):
        simulate(replace(schedule, tasks=schedule.tasks[::-1]), lambda task: 1.0)


# --- devices that share a processor ---


def weights_only(task):
    """Two seconds alone and three beside others for a W, nothing for the rest: W is all there is to see."""
    return Seconds(2.0, 3.0) if task.kind == "W" else Seconds(0.0, 0.0)


def spans_of_weights(hosts, *, delay=0.0, devices=(0, 1)):
    """Start and end of each stage's W, that of a lower stage beginning `delay` later than that of the one above."""
    schedule = wavefront(devices, (1,))
    timeline = simulate(
        schedule, weights_only, hosts=hosts, transfer=lambda task, a, b: delay if task.kind == "B" else 0.0
    )
    weights = sorted((task for task in schedule.tasks if task.kind == "W"), key=lambda task: task.stage)
    return [(timeline.start[task], timeline.end[task]) for task in weights]


def test_devices_that_are_busy_all_the_time_take_the_shared_time():
    assert spans_of_weights(("here", "here")) == [(0.0, 3.0), (0.0, 3.0)]


def test_a_device_whose_neighbours_are_idle_takes_the_time_alone():
    assert spans_of_weights(("here", "here"), delay=2.0) == [(2.0, 4.0), (0.0, 2.0)]


def test_devices_of_other_hosts_do_not_matter():
    assert spans_of_weights(("here", "there")) == [(0.0, 2.0), (0.0, 2.0)]


def test_pair_that_overlaps_in_part():
    """Stage 1 does half its W in the second it is alone, and the rest in 1.5 s; so stage 0 has half of its own left."""
    assert spans_of_weights(("here", "here"), delay=1.0) == [(1.0, 3.5), (0.0, 2.5)]


def test_times_are_interpolated_where_some_devices_of_the_host_are_busy():
    """Two of three busy: half way between alone and shared. The third has no stage, or stands still."""
    assert spans_of_weights(("here", "here", "here")) == [(0.0, 2.5), (0.0, 2.5)]
    assert spans_of_weights(("here", "there", "here", "here"), devices=(0, 2)) == [(0.0, 2.5), (0.0, 2.5)]


def test_all_of_a_step_on_one_processor():
    """Two devices that gain nothing from each other: tasks side by side take the time they take one after another."""
    schedule = wavefront((0, 1), (4,))
    timeline = simulate(schedule, lambda task: Seconds(1.0, 2.0), hosts=("here", "here"))
    assert timeline.makespan == 2 * (4 + 4 + 1 + 1)
    assert simulate(schedule, lambda task: 1.0).makespan == 5 * 2 + 1 + 1


@st.composite
def shared_cases(draw):
    """A case whose devices share hosts, with random seconds alone and shared."""
    schedule, alone, transfer = draw(cases())
    slower = random.Random(draw(st.integers(0, 2**32)))
    times = {task: Seconds(seconds, seconds * (1 + 2 * slower.random())) for task, seconds in alone.items()}
    hosts = draw(st.lists(st.sampled_from("ab"), min_size=4, max_size=6))
    return schedule, times, transfer, hosts


@given(shared_cases())
def test_every_task_does_all_its_work(case):
    """Its progress, added up from the spans of all tasks: 1 / its time beside so many, over each stretch of time."""
    schedule, times, transfer, hosts = case
    timeline = simulate(schedule, times, transfer=transfer, hosts=hosts)
    moments = sorted({*timeline.start.values(), *timeline.end.values()})
    for task, (alone, shared) in times.items():
        host = hosts[schedule.devices[task.stage]]
        others = [t for t in schedule.tasks if hosts[schedule.devices[t.stage]] == host and t != task]
        progress = 0.0
        for begin, end in pairwise(m for m in moments if timeline.start[task] <= m <= timeline.end[task]):
            beside = sum(timeline.start[t] <= begin and end <= timeline.end[t] for t in others)
            slowdown = beside / (hosts.count(host) - 1) if beside else 0.0
            progress += (end - begin) / (alone + (shared - alone) * slowdown)
        assert progress == pytest.approx(1.0 if alone else 0.0)


@given(shared_cases())
def test_shared_step_is_ordered_and_between_the_extremes(case):
    schedule, times, transfer, hosts = case
    timeline = simulate(schedule, times, transfer=transfer, hosts=hosts)
    for order in schedule.by_device().values():
        for task, follower in pairwise(order):
            assert timeline.end[task] <= timeline.start[follower]
    for task in schedule.tasks:
        for need in dependencies(schedule, task):
            apart = schedule.devices[need.stage] != schedule.devices[task.stage]
            assert timeline.end[need] + (transfer(need, need.stage, task.stage) if apart else 0.0) <= (
                timeline.start[task] + 1e-9
            )
    alone = simulate(schedule, {task: seconds.alone for task, seconds in times.items()}, transfer=transfer)
    shared = simulate(schedule, {task: seconds.shared for task, seconds in times.items()}, transfer=transfer)
    assert alone.makespan - 1e-9 <= timeline.makespan <= shared.makespan + 1e-9


@given(cases())
def test_hosts_of_one_device_each_change_nothing(case):
    """The simulation from event to event and the one in a single pass agree to the last bit."""
    schedule, times, transfer = case
    apart = simulate(schedule, times, transfer=transfer)
    assert simulate(schedule, times, transfer=transfer, hosts=range(4)) == apart


def test_every_device_needs_a_host():
    message = "hosts gives the host of 1 devices, the schedule uses device 1: pass one host for each device index"
    with pytest.raises(InputError, match=message):
        simulate(wavefront((0, 1), (1,)), lambda task: 1.0, hosts=("here",))


# --- speed ---


@pytest.mark.parametrize("generate", [wavefront, gpipe, one_f_one_b, zero_bubble])
def test_64_stages_of_32_units_are_planned_at_once(generate):
    begin = time.process_time()
    schedule = generate(range(64), (8,) * 4)
    simulate(schedule, lambda task: 1.0)
    simulate(schedule, lambda task: Seconds(1.0, 1.5), hosts=[i // 8 for i in range(64)])  # eight hosts of eight
    assert time.process_time() - begin < 2.0  # 0.3 s on an idle core
