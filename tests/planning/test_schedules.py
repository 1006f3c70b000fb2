"""The schedules there are: timetables as drawn, what each promises of its order, and one of a user's own."""

import re
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.errors import InputError
from mp_lstm.planning import (
    SCHEDULES,
    Task,
    Unit,
    arrange,
    dependencies,
    gpipe,
    one_f_one_b,
    serial,
    validate,
    wavefront,
    weight_task,
    work,
    zero_bubble,
)
from mp_lstm.planning.schedule import label

devices_strategy = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)
chunks_strategy = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)
defer_strategy = st.none() | st.integers(1, 4)
generators_strategy = st.sampled_from([wavefront, gpipe, one_f_one_b, zero_bubble])  # those that cut time


def f(stage, chunk, microbatch=0):
    return Task("F", stage, (Unit(microbatch, chunk),))


def b(stage, chunk, microbatch=0):
    return Task("B", stage, (Unit(microbatch, chunk),))


def drawn(schedule):
    return "\n" + str(schedule) + "\n"


def of_stage(schedule, stage, kinds):
    return [task for task in schedule.tasks if task.stage == stage and task.kind in kinds]


def forwards(stage, microbatch, chunks):
    return [f(stage, chunk, microbatch) for chunk in range(chunks[microbatch])]


def backwards(stage, microbatch, chunks):
    return [b(stage, chunk, microbatch) for chunk in reversed(range(chunks[microbatch]))]


def most_in_flight(schedule, stage, last):
    """Most micro-batches of a stage whose first F is done and whose last task of kind `last` is not."""
    held, most = 0, 0
    for task in of_stage(schedule, stage, "F" + last):
        if task.kind == "W" or task.units[0].chunk == 0:
            held += 1 if task.kind == "F" else -1
        most = max(most, held)
    return most


# --- timetables ---


def test_timetable_of_three_stages():
    assert drawn(wavefront((0, 1, 2), (3,))) == dedent("""
        tick      0   1   2   3   4   5   6   7   8   9  10  11
        stage 0   F0  F1  F2  .   .   .   .   B2  B1  B0  W   U
        stage 1   .   F0  F1  F2  .   .   B2  B1  B0  W   .   U
        stage 2   .   .   F0  F1  F2  B2  B1  B0  W   .   .   U
        """)


def test_timetable_of_uneven_microbatches():
    """A window of two buckets: the second batch follows without a gap."""
    assert drawn(wavefront((0, 1), (2, 1))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10
        stage 0   F0.0  F0.1  F1.0  .     .     B0.1  B0.0  B1.0  W0    W1    U
        stage 1   .     F0.0  F0.1  F1.0  B0.1  B0.0  B1.0  W0    W1    .     U
        """)


def test_timetable_with_one_tape():
    """Each W comes before the B that would complete a second tape."""
    assert drawn(wavefront((0, 1), (1, 1, 1), defer=1)) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11
        stage 0   F0.0  F1.0  F2.0  .     .     B0.0  W0    B1.0  W1    B2.0  W2    U
        stage 1   .     F0.0  F1.0  F2.0  B0.0  W0    B1.0  W1    B2.0  W2    .     U
        """)


def test_timetable_of_stages_that_share_a_device():
    """Stages 0 and 2 take turns on device 0, and still have a row each."""
    assert drawn(wavefront((0, 1, 0), (2,))) == dedent("""
        tick      0   1   2   3   4   5   6   7   8   9  10  11
        stage 0   F0  F1  .   .   .   .   B1  B0  W   .   U   .
        stage 1   .   F0  F1  .   .   B1  B0  W   .   .   U   .
        stage 2   .   .   F0  F1  B1  B0  .   .   .   W   .   U
        """)


def test_timetable_of_serial():
    assert drawn(serial((0, 1, 2), (1,))) == dedent("""
        tick      0   1   2   3   4   5   6   7
        stage 0   F0  .   .   .   .   B0  W   U
        stage 1   .   F0  .   .   B0  W   .   U
        stage 2   .   .   F0  B0  W   .   .   U
        """)


def test_serial_finishes_a_batch_before_the_next():
    assert drawn(serial((0, 1), (1, 1))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10
        stage 0   F0.0  .     .     B0.0  W0    F1.0  .     .     B1.0  W1    U
        stage 1   .     F0.0  B0.0  W0    .     .     F1.0  B1.0  W1    .     U
        """)


def test_timetable_of_gpipe():
    assert drawn(gpipe((0, 1, 2), (1, 1, 1))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11    12    13
        stage 0   F0.0  F1.0  F2.0  .     .     .     .     B2.0  W2    B1.0  W1    B0.0  W0    U
        stage 1   .     F0.0  F1.0  F2.0  .     .     B2.0  W2    B1.0  W1    B0.0  W0    .     U
        stage 2   .     .     F0.0  F1.0  F2.0  B2.0  W2    B1.0  W1    B0.0  W0    .     .     U
        """)


def test_timetable_of_gpipe_in_chunks():
    assert drawn(gpipe((0, 1), (2, 1, 2))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11    12    13    14    15
        stage 0   F0.0  F0.1  F1.0  F2.0  F2.1  .     .     B2.1  B2.0  W2    B1.0  W1    B0.1  B0.0  W0    U
        stage 1   .     F0.0  F0.1  F1.0  F2.0  F2.1  B2.1  B2.0  W2    B1.0  W1    B0.1  B0.0  W0    .     U
        """)


def test_timetable_of_one_f_one_b():
    assert drawn(one_f_one_b((0, 1, 2), (1, 1, 1, 1))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11    12    13    14    15    16
        stage 0   F0.0  F1.0  F2.0  .     .     B0.0  W0    F3.0  B1.0  W1    .     B2.0  W2    .     B3.0  W3    U
        stage 1   .     F0.0  F1.0  .     B0.0  W0    F2.0  B1.0  W1    F3.0  B2.0  W2    .     B3.0  W3    .     U
        stage 2   .     .     F0.0  B0.0  W0    F1.0  B1.0  W1    F2.0  B2.0  W2    F3.0  B3.0  W3    .     .     U
        """)


def test_timetable_of_one_f_one_b_in_chunks():
    assert drawn(one_f_one_b((0, 1), (2, 2))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11    12
        stage 0   F0.0  F0.1  F1.0  F1.1  B0.1  B0.0  W0    .     .     B1.1  B1.0  W1    U
        stage 1   .     F0.0  F0.1  B0.1  B0.0  W0    F1.0  F1.1  B1.1  B1.0  W1    .     U
        """)


def test_timetable_of_one_f_one_b_on_one_device():
    """W goes before B, B before F, and the later stage before the earlier one: little is held."""
    assert drawn(one_f_one_b((0, 0), (1, 1))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11    12    13
        stage 0   F0.0  .     .     .     F1.0  B0.0  W0    .     .     .     B1.0  W1    .     U
        stage 1   .     F0.0  B0.0  W0    .     .     .     F1.0  B1.0  W1    .     .     U     .
        """)


def test_timetable_of_zero_bubble():
    """The Ws fill what is idle in the timetable of 1F1B but for one tick less than there are stages."""
    assert drawn(zero_bubble((0, 1, 2), (1, 1, 1, 1))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11    12    13    14
        stage 0   F0.0  F1.0  F2.0  .     .     B0.0  W0    F3.0  B1.0  W1    B2.0  W2    B3.0  W3    U
        stage 1   .     F0.0  F1.0  .     B0.0  F2.0  B1.0  W0    F3.0  B2.0  W1    B3.0  W2    W3    U
        stage 2   .     .     F0.0  B0.0  F1.0  B1.0  F2.0  B2.0  W0    F3.0  B3.0  W1    W2    W3    U
        """)


def test_timetable_of_zero_bubble_with_stages_that_share_a_device():
    """The device of stages 0 and 2 keeps the order of F and B that 1F1B has on it."""
    assert drawn(zero_bubble((0, 1, 0), (1, 1))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11    12    13
        stage 0   F0.0  F1.0  .     .     .     B0.0  .     .     W0    B1.0  .     W1    .     U
        stage 1   .     F0.0  F1.0  .     B0.0  W0    .     .     B1.0  W1    .     .     U     .
        stage 2   .     .     F0.0  B0.0  W0    .     F1.0  B1.0  .     .     W1    .     U     .
        """)


# --- what holds for all of them ---


@given(generators_strategy, devices_strategy, chunks_strategy, defer_strategy)
def test_every_schedule_is_valid(generate, devices, chunks, defer):
    schedule = generate(devices, chunks, defer=defer)
    assert (schedule.name, schedule.devices, schedule.chunks) == (generate.__name__, devices, chunks)
    assert schedule.defer <= min(len(chunks), defer or len(chunks))
    validate(schedule)


@given(devices_strategy, st.integers(1, 4), defer_strategy)
def test_serial_is_valid(devices, microbatches, defer):
    validate(serial(devices, (1,) * microbatches, defer=defer))


@given(generators_strategy, devices_strategy, chunks_strategy, defer_strategy)
def test_devices_that_follow_their_own_orders_never_deadlock(generate, devices, chunks, defer):
    """Each device blocks on its next task; written apart from the total order and from `simulate`."""
    schedule = generate(devices, chunks, defer=defer)
    queues = {device: list(tasks) for device, tasks in schedule.by_device().items()}
    done = set()
    while any(queues.values()):
        able = [q for q in queues.values() if q and done.issuperset(dependencies(schedule, q[0]))]
        assert able, f"every device waits: {[str(q[0]) for q in queues.values() if q]}"
        done.update(q.pop(0) for q in able)
    assert done == set(work(len(devices), chunks))


@given(generators_strategy, devices_strategy, chunks_strategy)
def test_chunks_of_a_microbatch_go_up_in_f_and_down_in_b(generate, devices, chunks):
    schedule = generate(devices, chunks)
    for stage in range(len(devices)):
        for microbatch in range(len(chunks)):
            passes = [task for task in of_stage(schedule, stage, "FB") if task.microbatch == microbatch]
            assert passes == forwards(stage, microbatch, chunks) + backwards(stage, microbatch, chunks)


def test_dispatch_alternates_between_devices():
    """No device waits for a thread that is still enqueueing another device's work."""
    order = wavefront((0, 1), (8,)).tasks
    forward = [task.stage for task in order if task.kind == "F"]
    assert forward == [0, *[0, 1] * 7, 1]


def test_schedules_by_name():
    assert list(SCHEDULES) == ["serial", "wavefront", "gpipe", "one_f_one_b", "zero_bubble"]
    assert [generate((0,), (1,)).name for generate in SCHEDULES.values()] == list(SCHEDULES)


# --- what each promises ---


@given(devices_strategy, chunks_strategy, defer_strategy)
def test_wavefront_does_all_f_then_b_by_microbatch(devices, chunks, defer):
    schedule = wavefront(devices, chunks, defer=defer)
    microbatches = range(len(chunks))
    for stage in range(len(devices)):
        forward = [task for m in microbatches for task in forwards(stage, m, chunks)]
        backward = [task for m in microbatches for task in backwards(stage, m, chunks)]
        assert of_stage(schedule, stage, "FB") == forward + backward
        assert [task.microbatch for task in of_stage(schedule, stage, "W")] == list(microbatches)


@given(devices_strategy, chunks_strategy, defer_strategy)
def test_gpipe_does_all_f_then_b_and_w_from_the_last_microbatch(devices, chunks, defer):
    schedule = gpipe(devices, chunks, defer=defer)
    microbatches = range(len(chunks))
    for stage in range(len(devices)):
        expected = [task for m in microbatches for task in forwards(stage, m, chunks)]
        for m in reversed(microbatches):
            expected += [*backwards(stage, m, chunks), weight_task(stage, m, chunks)]
        assert of_stage(schedule, stage, "FBW") == expected


@given(devices_strategy, chunks_strategy, defer_strategy)
def test_one_f_one_b_alternates_after_its_warm_up(devices, chunks, defer):
    schedule = one_f_one_b(devices, chunks, defer=defer)
    for stage in range(len(devices)):
        ahead = min(len(devices) - stage, len(chunks))
        order = [(task.kind, task.microbatch) for task in of_stage(schedule, stage, "FBW")]
        passes = list(dict.fromkeys(order))  # F, B and W of micro-batches, whatever their chunks
        expected = [("F", m) for m in range(ahead)]
        for m in range(len(chunks)):
            expected += [("B", m), ("W", m)]
            expected += [("F", m + ahead)] if m + ahead < len(chunks) else []
        assert passes == expected
        assert most_in_flight(schedule, stage, "B") == ahead


@given(devices_strategy, chunks_strategy, defer_strategy)
def test_zero_bubble_moves_nothing_but_w(devices, chunks, defer):
    schedule, classic = zero_bubble(devices, chunks, defer=defer), one_f_one_b(devices, chunks)
    for device, order in classic.by_device().items():
        passes = [task for task in schedule.by_device()[device] if task.kind in "FB"]
        assert passes == [task for task in order if task.kind in "FB"]
    for stage in range(len(devices)):
        assert [task.microbatch for task in of_stage(schedule, stage, "W")] == list(range(len(chunks)))
        assert most_in_flight(schedule, stage, "W") <= min(len(devices), len(chunks))


def test_zero_bubble_may_hold_one_tape():
    """Each W then comes before the B that would complete a second one."""
    assert drawn(zero_bubble((0, 1), (1, 1, 1), defer=1)) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11
        stage 0   F0.0  F1.0  .     B0.0  W0    F2.0  B1.0  W1    .     B2.0  W2    U
        stage 1   .     F0.0  B0.0  F1.0  W0    B1.0  F2.0  W1    B2.0  W2    .     U
        """)


def test_zero_bubble_finds_idle_time_by_the_seconds_it_is_given():
    """F of stage 0 is slow, so stage 1 waits for F1.0, where in ticks it seems to follow at once."""

    def order(**options):
        return [label(task) for task in zero_bubble((0, 1), (1, 1), **options).by_device()[1]]

    assert order() == ["F0.0", "B0.0", "F1.0", "B1.0", "W0", "W1", "U"]
    slow = order(times=lambda task: 5.0 if task.kind == "F" and task.stage == 0 else 1.0)
    assert slow == ["F0.0", "B0.0", "W0", "F1.0", "B1.0", "W1", "U"]


def test_defer_is_at_most_the_number_of_microbatches():
    assert wavefront((0,), (1, 1)).defer == 2
    assert wavefront((0,), (1, 1), defer=9).defer == 2
    assert wavefront((0,), (1, 1), defer=1).defer == 1
    assert zero_bubble((0, 1, 2), (1, 1), defer=9).defer == 2
    assert zero_bubble((0, 1), (1, 1, 1)).defer == 2  # no stage holds more than S micro-batches
    assert [generate((0,), (1, 1)).defer for generate in (serial, gpipe, one_f_one_b)] == [1, 1, 1]


# --- a user's own ---


def own_schedule(devices, chunks, *, defer=None):
    """B first, then W, then F, with at most two micro-batches in flight on every stage."""

    def after(task):
        if task.kind == "F" and task.units[0].chunk == 0 and task.microbatch >= 2:
            return [Task("B", task.stage, (Unit(task.microbatch - 2, 0),))]
        return []

    def rank(task):
        return "BWFU".index(task.kind), task.units

    return arrange("own", devices, chunks, after=after, rank=rank, defer=defer or len(chunks))


def test_own_schedule_is_edges_and_a_rank():
    assert drawn(own_schedule((0, 1), (1, 1, 1))) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10    11
        stage 0   F0.0  F1.0  .     B0.0  W0    F2.0  B1.0  W1    .     B2.0  W2    U
        stage 1   .     F0.0  B0.0  W0    F1.0  B1.0  W1    F2.0  B2.0  W2    .     U
        """)


@given(devices_strategy, chunks_strategy)
def test_own_schedule_is_valid(devices, chunks):
    schedule = own_schedule(devices, chunks)
    validate(schedule)
    assert max(most_in_flight(schedule, stage, "B") for stage in range(len(devices))) <= 2


# --- messages ---


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (
            lambda: serial((0, 1), (1, 3)),
            "schedule 'serial' got 3 chunks for micro-batch 1, it cuts no time: use 1 chunk, or schedule='wavefront'",
        ),
        (
            lambda: wavefront((0,), ()),
            "a schedule got chunks=(), wanted at least 1 for each micro-batch: pass e.g. (4,)",
        ),
        (lambda: gpipe((0,), (2, 0)), "a schedule got chunks=(2, 0), wanted at least 1 for each micro-batch"),
        (lambda: one_f_one_b((), (2,)), "a schedule got no stages: pass the device index of each stage, e.g. (0, 1)"),
        (
            lambda: zero_bubble((0,), (2,), defer=0),
            "defer is 0, but a W needs its tape: pass at least 1, or None for no limit",
        ),
    ],
)
def test_wrong_arguments_are_explained(generate, message):
    with pytest.raises(InputError, match=re.escape(message)):
        generate()


def test_cycle_of_an_own_schedule_is_named():
    def after(task):
        return [b(0, 0)] if task == f(0, 0) else []

    message = (
        "schedule 'mine' never runs F0.0 of stage 0: it waits for B0.0 of stage 0, "
        "which never runs either: remove an edge of `after`"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        arrange("mine", (0,), (1,), after=after, rank=lambda task: 0, defer=1)


def test_edge_of_an_own_schedule_from_nowhere_is_named():
    def after(task):
        return [b(0, 1)] if task == f(0, 0) else []

    message = (
        "schedule 'mine' puts F0.0 of stage 0 after ('B', 0, (Unit(microbatch=0, chunk=1),)), "
        "which is not a task of its 1 stages and chunks (1,): remove this edge from `after`"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        arrange("mine", (0,), (1,), after=after, rank=lambda task: 0, defer=1)
