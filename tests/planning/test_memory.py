"""Peak bytes: the counts of the textbook, a walk by hand, and the lifetimes of all arrays, written apart."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from mp_lstm.planning import (
    SCHEDULES,
    StageMemory,
    gpipe,
    one_f_one_b,
    peak_bytes,
    serial,
    wavefront,
    weight_task,
    zero_bubble,
)
from mp_lstm.planning.schedule import Task

NOTHING = StageMemory(0, 0, 0, 0, 0, 0, 0, 0, 0)


def alike(stage, stages, microbatches):
    return [[stage] * microbatches] * stages


@given(st.integers(1, 5), st.integers(1, 5))
def test_gpipe_holds_all_microbatches_and_one_f_one_b_few(stages, microbatches):
    """M of them on every stage against min(M, S-s) on stage s, S of which in flight until W under zero bubble."""
    chunks = (1,) * microbatches
    saves = alike(NOTHING._replace(saved=1), stages, microbatches)
    keeps = alike(NOTHING._replace(kept=1), stages, microbatches)
    assert peak_bytes(gpipe(range(stages), chunks), saves) == dict.fromkeys(range(stages), microbatches)
    few = {stage: min(microbatches, stages - stage) for stage in range(stages)}
    assert peak_bytes(one_f_one_b(range(stages), chunks), saves) == few
    assert peak_bytes(one_f_one_b(range(stages), chunks), keeps) == few
    assert peak_bytes(zero_bubble(range(stages), chunks), saves) == few
    assert max(peak_bytes(zero_bubble(range(stages), chunks), keeps).values()) == min(microbatches, stages)


def test_walk_by_hand():
    """One stage and one micro-batch of two chunks, F0 F1 B1 B0 W U, above 1000 bytes that are always held."""
    stage = StageMemory(
        fixed=1000,
        saved=100,
        kept=10,
        tape=30,
        input=5,
        output=1,
        scratch_forward=0,
        scratch_backward=0,
        scratch_weight=0,
    )
    schedule = wavefront((0,), (2,))
    held_after = {"F0": 115, "F1": 230, "B1": 160, "B0": 90}
    assert list(held_after) == str(schedule).splitlines()[1].split()[2:6]

    def peak(**scratch):
        return peak_bytes(schedule, [[stage._replace(**scratch)]])[0] - 1000

    assert peak() == 230 + 30  # B1 runs: its tape is made before what F1 saved is freed
    assert peak(scratch_forward=200) == 115 + 115 + 1 + 200  # F1 runs
    assert peak(scratch_backward=200) == 230 + 30 + 200  # B1 runs
    assert peak(scratch_weight=200) == 90 + 200  # W runs
    assert peak(scratch_add=2000) == peak()  # there is nothing to add to


def test_weight_gradient_frees_all_of_its_microbatch():
    """Two micro-batches of different sizes: with room for one tape the first is freed before the second is made."""
    small, large = NOTHING._replace(tape=1), NOTHING._replace(tape=10)
    memories = [[large, small]]
    assert peak_bytes(wavefront((0,), (2, 3), defer=1), memories) == {0: 20 + 2}  # W0 before B1.0
    assert peak_bytes(wavefront((0,), (2, 3)), memories) == {0: 20 + 3}
    assert peak_bytes(gpipe((0,), (2, 3)), memories) == {0: 20}


def test_a_weight_gradient_that_adds_makes_one_of_its_own():
    """The first of three makes the gradient of 100 bytes; the second makes another, while one unit less is there."""
    stage = NOTHING._replace(tape=30, gradient=100, scratch_weight=1, scratch_add=100)
    assert peak_bytes(gpipe((0,), (1, 1, 1)), [[stage] * 3]) == {0: 30 + 200 + 1}
    assert peak_bytes(gpipe((0,), (1, 1, 1)), [[stage._replace(scratch_add=0)] * 3]) == {0: 30 + 100 + 1}
    assert peak_bytes(gpipe((0,), (1,)), [[stage]]) == {0: 30 + 100 + 1}


def test_arrays_wait_where_they_were_sent():
    """Stage 1 holds x of 7 bytes while it does F, and stage 0 the gradient of it while it does B."""
    memories = [[NOTHING._replace(output=7)], [NOTHING]]
    assert peak_bytes(serial((0, 1), (1,)), memories) == {0: 7, 1: 7}
    saves_input = [memories[0], [NOTHING._replace(input=7)]]
    assert peak_bytes(serial((0, 1), (1,)), saves_input) == {0: 7, 1: 14}  # x and, while B runs, its gradient


def test_stages_of_one_device_add_up():
    memories = [[NOTHING._replace(fixed=100, saved=1)], [NOTHING._replace(fixed=20, saved=2)]]
    assert peak_bytes(serial((0, 0), (1,)), memories) == {0: 123}
    assert peak_bytes(serial((1, 0), (1,)), memories) == {0: 22, 1: 101}


sizes_strategy = st.builds(StageMemory, *[st.integers(0, 50)] * 11)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(list(SCHEDULES)))
    devices = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    chunks = draw(st.lists(st.just(1) if name == "serial" else st.integers(1, 3), min_size=1, max_size=3))
    memories = [[draw(sizes_strategy) for _ in chunks] for _ in devices]
    for stage, own in enumerate(memories):
        for m, memory in enumerate(own):
            saves = memory.input % 2  # the x that a stage saves is what the one below put out
            saved = (memories[stage - 1][m].output if stage else memory.input) * saves
            own[m] = memory._replace(fixed=own[0].fixed, gradient=own[0].gradient, input=saved)
    return SCHEDULES[name](devices, chunks), memories


@given(cases())
def test_peak_is_that_of_the_lifetimes_of_all_arrays(case):
    schedule, memories = case
    assert peak_bytes(schedule, memories) == peak_of_lifetimes(schedule, memories)


def peak_of_lifetimes(schedule, memories):
    """Each array with its size, the first and the last position at which it is there, and the device it is on."""
    at = {task: position for position, task in enumerate(schedule.tasks)}
    last = schedule.stages - 1
    held = defaultdict(lambda: [0] * len(schedule.tasks))

    def alive(stage, first, until, size):
        for position in range(first, until + 1):
            held[schedule.devices[stage]][position] += size

    for stage, own in enumerate(memories):
        alive(stage, 0, len(schedule.tasks) - 1, own[0].fixed)
        first = min(at[weight_task(stage, m, schedule.chunks)] for m in range(len(own)))
        alive(stage, first, at[Task("U", stage)], own[0].gradient)
        for m, memory in enumerate(own):
            weights = weight_task(stage, m, schedule.chunks)
            w = at[weights]
            alive(stage, w, w, memory.scratch_weight + (memory.scratch_add if w > first else 0))
            for unit in weights.units:
                f, b = at[Task("F", stage, (unit,))], at[Task("B", stage, (unit,))]
                alive(stage, f, f, memory.scratch_forward + memory.output)
                alive(stage, b, b, memory.scratch_backward)
                alive(stage, f, b, memory.saved)
                alive(stage, f, w, memory.kept)
                alive(stage, b, w, memory.tape)
                if stage == 0:
                    alive(stage, f, w, memory.input)
                else:
                    x = memories[stage - 1][m].output
                    alive(stage, at[Task("F", stage - 1, (unit,))] + 1, w if memory.input else f, x)
                    alive(stage, b, b, x)  # its gradient, made here
                if stage < last:
                    alive(stage, at[Task("B", stage + 1, (unit,))] + 1, b, memory.output)  # the gradient, sent here
    return {device: max(held[device]) for device in sorted(set(schedule.devices))}
