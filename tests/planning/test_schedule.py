"""Schedules: the timetables as drawn, the dependencies as listed, and what `validate` finds."""

import re
from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.errors import InputError
from mp_lstm.planning import SCHEDULES, Task, Unit, arrange, dependencies, serial, validate, wavefront
from mp_lstm.planning.schedule import weight_task, work

devices_strategy = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)
chunks_strategy = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
defer_strategy = st.none() | st.integers(1, 4)


def f(stage, chunk, microbatch=0):
    return Task("F", stage, (Unit(microbatch, chunk),))


def b(stage, chunk, microbatch=0):
    return Task("B", stage, (Unit(microbatch, chunk),))


def drawn(schedule):
    return "\n" + str(schedule) + "\n"


# --- timetables ---


def test_timetable_of_the_architecture_page():
    assert drawn(wavefront((0, 1), (4,))) == dedent("""
        tick      0   1   2   3   4   5   6   7   8   9  10  11
        stage 0   F0  F1  F2  F3  .   .   B3  B2  B1  B0  W   U
        stage 1   .   F0  F1  F2  F3  B3  B2  B1  B0  W   .   U
        """)


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


def test_columns_stay_apart_when_ticks_have_many_digits():
    header, *rows = str(wavefront((0,), (60,))).splitlines()
    assert len(header.split()) == 1 + 122
    assert [row.split()[-2:] for row in rows] == [["W", "U"]]
    assert header.index("100") + 2 == rows[0].index("B19")


# --- dependencies ---


def test_dependencies_of_a_unit_inside():
    schedule = wavefront((0, 1, 2), (3, 3))
    assert set(dependencies(schedule, f(1, 1))) == {f(0, 1), f(1, 0)}
    assert set(dependencies(schedule, b(1, 1))) == {f(1, 1), b(2, 1), b(1, 2)}


def test_dependencies_at_the_borders():
    schedule = wavefront((0, 1), (3, 2))
    assert dependencies(schedule, f(0, 0)) == ()
    assert set(dependencies(schedule, f(0, 0, microbatch=1))) == {f(0, 2)}  # the carried state
    assert set(dependencies(schedule, b(1, 2))) == {f(1, 2)}  # the last chunk of the last stage
    assert set(dependencies(schedule, b(1, 1))) == {f(1, 1), b(1, 2)}
    assert set(dependencies(schedule, b(0, 1, microbatch=1))) == {f(0, 1, 1), b(1, 1, 1)}


def test_weight_gradient_needs_all_its_chunks_and_the_update_every_weight_gradient():
    schedule = wavefront((0, 1), (3, 2))
    weights = weight_task(1, 0, schedule.chunks)
    assert weights == Task("W", 1, (Unit(0, 0), Unit(0, 1), Unit(0, 2)))
    assert set(dependencies(schedule, weights)) == {b(1, 0), b(1, 1), b(1, 2)}
    everyone = {weight_task(stage, microbatch, schedule.chunks) for stage in (0, 1) for microbatch in (0, 1)}
    assert set(dependencies(schedule, Task("U", 0))) == everyone


def test_work_of_a_step():
    tasks = work(2, (3, 2))
    assert len(tasks) == len(set(tasks)) == 2 * (5 + 5 + 2 + 1)


# --- generators ---


@given(devices_strategy, chunks_strategy, defer_strategy)
def test_wavefront_is_valid(devices, chunks, defer):
    validate(wavefront(devices, chunks, defer=defer))


@given(devices_strategy, st.integers(1, 4), defer_strategy)
def test_serial_is_valid(devices, microbatches, defer):
    validate(serial(devices, (1,) * microbatches, defer=defer))


@given(devices_strategy, chunks_strategy, defer_strategy)
def test_wavefront_does_all_f_then_b_by_microbatch(devices, chunks, defer):
    schedule = wavefront(devices, chunks, defer=defer)
    forward = [Unit(m, c) for m, count in enumerate(chunks) for c in range(count)]
    backward = [Unit(m, c) for m, count in enumerate(chunks) for c in reversed(range(count))]
    for stage in range(len(devices)):
        mine = [task for task in schedule.tasks if task.stage == stage]
        passes = [(task.kind, task.units[0]) for task in mine if task.kind in "FB"]
        assert passes == [*(("F", unit) for unit in forward), *(("B", unit) for unit in backward)]
        assert [task.microbatch for task in mine if task.kind == "W"] == list(range(len(chunks)))


@given(devices_strategy, chunks_strategy, defer_strategy)
def test_devices_that_follow_their_own_orders_never_deadlock(devices, chunks, defer):
    """Each device blocks on its next task; written apart from the total order and from `simulate`."""
    schedule = wavefront(devices, chunks, defer=defer)
    queues = {device: list(tasks) for device, tasks in schedule.by_device().items()}
    done = set()
    while any(queues.values()):
        able = [q for q in queues.values() if q and done.issuperset(dependencies(schedule, q[0]))]
        assert able, f"every device waits: {[str(q[0]) for q in queues.values() if q]}"
        done.update(q.pop(0) for q in able)
    assert done == set(work(len(devices), chunks))


def test_by_device_splits_the_total_order():
    schedule = wavefront((3, 1, 3), (2,))
    orders = schedule.by_device()
    assert list(orders) == [1, 3]
    for device, order in orders.items():
        assert order == tuple(t for t in schedule.tasks if schedule.devices[t.stage] == device)


def test_dispatch_alternates_between_devices():
    """No device waits for a thread that is still enqueueing another device's work."""
    order = wavefront((0, 1), (8,)).tasks
    forward = [task.stage for task in order if task.kind == "F"]
    assert forward == [0, *[0, 1] * 7, 1]


def test_defer_is_at_most_the_number_of_microbatches():
    assert wavefront((0,), (1, 1)).defer == 2
    assert wavefront((0,), (1, 1), defer=9).defer == 2
    assert wavefront((0,), (1, 1), defer=1).defer == 1
    assert serial((0,), (1, 1)).defer == 1


def test_schedules_by_name():
    assert (SCHEDULES["serial"], SCHEDULES["wavefront"]) == (serial, wavefront)


def test_own_schedule_is_edges_and_a_rank():
    """1F1B over three micro-batches, from two choices: B before F, and a bound on the units in flight."""
    stages, chunks = 2, (1, 1, 1)

    def after(task):
        in_flight = stages - task.stage
        if task.kind == "F" and task.microbatch >= in_flight:
            return [b(task.stage, 0, task.microbatch - in_flight)]
        return []

    schedule = arrange(
        "1f1b", (0, 1), chunks, after=after, rank=lambda task: ("BFWU".index(task.kind), task.units), defer=3
    )
    validate(schedule)
    assert drawn(schedule) == dedent("""
        tick      0     1     2     3     4     5     6     7     8     9    10
        stage 0   F0.0  F1.0  .     B0.0  F2.0  B1.0  W0    B2.0  W1    W2    U
        stage 1   .     F0.0  B0.0  F1.0  B1.0  F2.0  B2.0  W0    W1    W2    U
        """)


# --- messages ---

VALID = wavefront((0, 1), (2, 1))


def moved(schedule, task, position):
    tasks = [other for other in schedule.tasks if other != task]
    tasks.insert(position, task)
    return replace(schedule, tasks=tuple(tasks))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            moved(VALID, b(0, 0), 0),
            "schedule 'wavefront' has B0.0 of stage 0 at position 0, before F0.0 of stage 0, which it needs: swap them",
        ),
        (
            moved(VALID, b(0, 0), 8),
            "schedule 'wavefront' has B0.0 of stage 0 at position 8, before B0.0 of stage 1, which it needs: swap them",
        ),
        (
            moved(VALID, f(1, 0), 0),
            "schedule 'wavefront' has F0.0 of stage 1 at position 0, before F0.0 of stage 0, which it needs: swap them",
        ),
        (
            moved(VALID, Task("U", 1), 12),
            "schedule 'wavefront' has U of stage 1 at position 12, before W0 of stage 0, which it needs: swap them",
        ),
        (replace(VALID, tasks=VALID.tasks[:-1]), "schedule 'wavefront' lacks U of stage 1: add it"),
        (
            replace(VALID, tasks=(*VALID.tasks, VALID.tasks[0])),
            "schedule 'wavefront' has F0.0 of stage 0 twice: remove one",
        ),
        (
            replace(VALID, tasks=(f(2, 0), *VALID.tasks)),
            "schedule 'wavefront' has a task that is not of its 2 stages and chunks (2, 1): "
            "('F', 2, (Unit(microbatch=0, chunk=0),)): remove it",
        ),
        (
            replace(VALID, defer=1),
            "schedule 'wavefront' holds 2 tapes after B1.0 of stage 1, its defer is 1: "
            "do a W of the stage first, or raise defer",
        ),
        (replace(VALID, devices=()), "a schedule got no stages: pass the device index of each stage, e.g. (0, 1)"),
    ],
)
def test_validate_names_what_is_wrong(schedule, message):
    with pytest.raises(InputError, match=re.escape(message)):
        validate(schedule)


def test_validate_wants_all_chunks_of_a_weight_gradient_in_order():
    weights = weight_task(0, 0, VALID.chunks)
    reversed_units = weights._replace(units=weights.units[::-1])
    tasks = tuple(reversed_units if task == weights else task for task in VALID.tasks)
    with pytest.raises(InputError, match="has a task that is not of its 2 stages"):
        validate(replace(VALID, tasks=tasks))


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
        (lambda: wavefront((0,), (2, 0)), "a schedule got chunks=(2, 0), wanted at least 1 for each micro-batch"),
        (
            lambda: wavefront((0,), (2,), defer=0),
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
