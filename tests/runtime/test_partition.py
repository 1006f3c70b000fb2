"""Programs on a mesh: what one device runs, and where results lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mp_lstm.planning import Group
from mp_lstm.runtime.partition import part_of, result_shardings, stage_of
from mp_lstm.runtime.placement import over_rows, over_steps, own_part, put, stage_sharding, structs
from mp_lstm.runtime.programs import Program


def stage_of_itself(stage: NamedSharding) -> NamedSharding:
    return stage


@pytest.fixture
def stage(devices: list[jax.Device]) -> NamedSharding:
    return stage_sharding(Group(tuple(devices), data=2, model=2))


@pytest.mark.parametrize(
    ("place", "shape", "part"),
    [
        (over_steps, (3, 4, 5), (3, 2, 5)),
        (over_rows, (4, 5), (2, 5)),
        (own_part, (4, 3, 5), (3, 5)),
        (stage_of_itself, (3, 4), (3, 4)),
    ],
)
def test_parts_of_arrays(stage: NamedSharding, place: Any, shape: tuple[int, ...], part: tuple[int, ...]) -> None:
    struct = structs(jax.ShapeDtypeStruct(shape, jnp.float32), place(stage))
    assert part_of(struct).shape == part
    assert stage_of(struct) == stage


def test_a_program_sees_parts_and_what_it_keeps_stays_where_it_is(stage: NamedSharding) -> None:
    x = put(np.arange(12, dtype=np.float32).reshape(3, 4), over_steps(stage))

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
        assert x.shape == (3, 2), "each device has two of the four rows"
        part = jax.lax.axis_index("data") * 2 + jax.lax.axis_index("model")
        return x[0], x * 2, (x, part)

    program = Program("stage0_forward", forward, (x,), (), "forward")
    state, y, (kept, part) = program(x)
    assert kept is x
    np.testing.assert_array_equal(state, np.asarray(x)[0])
    np.testing.assert_array_equal(y, 2 * np.asarray(x))
    np.testing.assert_array_equal(part, np.arange(4))
    assert structs((state, y, (kept, part))) == program.results()
    assert [leaf.sharding for leaf in (state, y, part)] == [over_rows(stage), over_steps(stage), own_part(stage)]


def test_the_rest_is_divided_by_the_compiler(stage: NamedSharding) -> None:
    x = put(np.arange(8, dtype=np.float32), over_rows(stage))
    program = Program("stage0_total", lambda x: x.sum(), (x,), (), "total")
    total = program(x)
    assert float(total) == 28
    assert total.sharding == stage
    assert result_shardings("total", (x, total), stage) == [stage, stage]
