"""Compiled programs: pinned, without copies of what went in, and cached by bucket."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mp_lstm.runtime.placement import put, stage_sharding, structs
from mp_lstm.runtime.programs import Program, ProgramKey, Programs


@pytest.fixture
def x(devices: list[jax.Device]) -> jax.Array:
    return put(np.arange(3, dtype=np.float32), stage_sharding(devices[1]))


def test_an_input_is_handed_back_and_not_copied(x: jax.Array) -> None:
    program = Program("same", lambda a, b: {"sum": a + b, "kept": (a, b)}, (x, x + 1))
    y = x + 1
    result = program(x, y)
    assert result["kept"][0] is x
    assert result["kept"][1] is y
    assert result["sum"].tolist() == [1, 3, 5]


def test_a_value_that_comes_out_twice_is_computed_once(x: jax.Array) -> None:
    def twice(x: Any) -> Any:
        y = 2 * x
        return y, (y, x)

    y, (saved, given) = Program("twice", twice, (x,))(x)
    assert y is saved
    assert given is x


def test_a_donated_input_is_never_handed_back(x: jax.Array) -> None:
    program = Program("donating", lambda a, b: (a, a + b), (x, x), donate=(0,))
    a, b = jnp.copy(x), jnp.copy(x)
    kept, total = program(a, b)
    assert a.is_deleted()
    assert not b.is_deleted()
    assert kept.tolist() == [0, 1, 2]
    assert total.tolist() == [0, 2, 4]


def test_another_device_or_shape_raises(x: jax.Array, devices: list[jax.Device]) -> None:
    """So no transfer and no compilation slips in."""
    program = Program("pinned", lambda x: x + 1, (x,))
    with pytest.raises(ValueError, match="device"):
        program(jax.device_put(x, stage_sharding(devices[2])))
    with pytest.raises(TypeError, match="compiled"):
        program(put(np.zeros(4, np.float32), stage_sharding(devices[1])))


def test_results_are_structs_of_what_a_call_gives(x: jax.Array) -> None:
    program = Program("f", lambda x, n: {"y": x * n, "x": x, "none": None}, (x, structs(x)))
    assert program.results() == structs(program(x, x))


def test_executables_carry_their_name(x: jax.Array) -> None:
    """Profiles are read back by it."""
    program = Program("stage1_forward", lambda x: x + 1, (x,))
    assert program.name == "stage1_forward"
    assert "stage1_forward" in program.executable.as_text().splitlines()[0]
    assert program.memory().argument_size_in_bytes == 12


def test_the_cache_compiles_once_and_knows_its_buckets(x: jax.Array) -> None:
    programs = Programs(bound=3)
    shared, own = ProgramKey(0, "forward", 4), ProgramKey(0, "weight_gradient", 8)
    first = programs.get(shared, lambda x: x + 1, (x,), lengths=(4,))
    assert programs.get(shared, lambda x: x + 1, (x,), lengths=(8,)) is first
    programs.get(own, lambda x: x * 2, (x,), lengths=(8,))
    programs.get(ProgramKey(0, "update", None), lambda x: x - 1, (x,))
    assert len(programs) == 3
    assert set(programs[4]) == {shared}
    assert set(programs[8]) == {shared, own}
    report = programs.report()
    assert (report.programs, report.bound, report.by_length) == (3, 3, {4: 1, 8: 2})
    assert 0 < report.seconds <= max(p.ended for p in programs._programs.values()) - first.began
    text = str(report).splitlines()
    assert text[0].startswith("3 programs (at most 3), compiled in ")
    assert text[1:] == ["  bucket 4: uses 1", "  bucket 8: uses 2"]
    programs.clear()
    assert len(programs) == 0
    assert programs.report().by_length == {}
    assert programs.get(shared, lambda x: x + 1, (x,)) is not first
