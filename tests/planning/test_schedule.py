"""What a schedule is: how it is drawn, the dependencies as listed, and what `validate` finds."""

import re
from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.errors import InputError
from mp_lstm.planning import Schedule, Task, Unit, dependencies, timetable, validate, wavefront, weight_task, work

devices_strategy = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)
chunks_strategy = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def f(stage, chunk, microbatch=0):
    return Task("F", stage, (Unit(microbatch, chunk),))


def b(stage, chunk, microbatch=0):
    return Task("B", stage, (Unit(microbatch, chunk),))


# --- drawings ---


def test_print_draws_the_timetable():
    schedule = wavefront((0, 1), (4,))
    drawing = dedent("""
        tick      0   1   2   3   4   5   6   7   8   9  10  11
        stage 0   F0  F1  F2  F3  .   .   B3  B2  B1  B0  W   U
        stage 1   .   F0  F1  F2  F3  B3  B2  B1  B0  W   .   U
        """)
    assert str(schedule) == timetable(schedule) == drawing.strip()


def test_columns_stay_apart_when_ticks_have_many_digits():
    header, *rows = str(wavefront((0,), (60,))).splitlines()
    assert len(header.split()) == 1 + 122
    assert [row.split()[-2:] for row in rows] == [["W", "U"]]
    assert header.index("100") + 2 == rows[0].index("B19")


def test_an_order_that_cannot_run_is_not_drawn():
    schedule = wavefront((0,), (1,))
    message = "has U of stage 0 at position 0, before W0 of stage 0, which it needs: swap them"
    with pytest.raises(InputError, match=message):
        str(replace(schedule, tasks=schedule.tasks[::-1]))


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


@given(devices_strategy, chunks_strategy)
def test_needs_are_the_positions_of_the_dependencies(devices, chunks):
    """For U those of the last W of each stage, after which all others are done."""
    schedule = wavefront(devices, chunks)
    for task, needs in zip(schedule.tasks, schedule.needs, strict=True):
        found = {schedule.tasks[need] for need in needs}
        assert len(found) == len(needs)
        if task.kind == "U":
            assert found == {weight_task(stage, len(chunks) - 1, chunks) for stage in range(len(devices))}
        else:
            assert found == set(dependencies(schedule, task))


def test_work_of_a_step():
    tasks = work(2, (3, 2))
    assert len(tasks) == len(set(tasks)) == 2 * (5 + 5 + 2 + 1)


def test_by_device_splits_the_total_order():
    schedule = wavefront((3, 1, 3), (2,))
    orders = schedule.by_device()
    assert list(orders) == [1, 3]
    for device, order in orders.items():
        assert order == tuple(t for t in schedule.tasks if schedule.devices[t.stage] == device)


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
        (
            moved(VALID, weight_task(1, 1, (2, 1)), 16),
            "schedule 'wavefront' has U of stage 0 at position 15, before W1 of stage 1, which it needs: swap them",
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


def test_the_smallest_schedule_is_valid():
    validate(Schedule("mine", (0,), (1,), (f(0, 0), b(0, 0), weight_task(0, 0, (1,)), Task("U", 0)), defer=1))
