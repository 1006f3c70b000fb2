"""What a stage holds, worked out by hand from what its rows hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mp_lstm.planning.costs import RowMemory
from mp_lstm.planning.memory import StageMemory
from mp_lstm.planning.plan import BucketPlan
from mp_lstm.planning.prediction import run_again, stage_memory

ROWS = (
    RowMemory(
        parameters=1000,
        state=2000,
        largest=25,
        saved=100,
        kept=10,
        tape=20,
        input=4,
        output=5,
        scratch_forward=60,
        scratch_backward=1,
        scratch_weight=900,
    ),
    RowMemory(
        parameters=3000,
        state=6000,
        largest=40,
        saved=50,
        kept=7,
        tape=30,
        input=5,
        output=6,
        scratch_forward=2,
        scratch_backward=150,
        scratch_weight=1,
    ),
)


def costs_of_rows(*lean: int, largest: int = 25) -> Any:
    """Costs of the rows, of which W of lean ones needs 500 bytes beside the gradient; `largest` is of the first."""
    rows = (ROWS[0]._replace(largest=largest), ROWS[1])
    held = [row._replace(scratch_weight=row.parameters + 500) if i in lean else row for i, row in enumerate(rows)]
    return SimpleNamespace(memory=lambda row, rows, time: held[row], lean_rows=frozenset(lean))


def held(*lean: int, chunks: int = 1, microbatches: int = 1, remat: str = "none", largest: int = 25) -> StageMemory:
    bucket = BucketPlan(4 * chunks, 4, chunks, microbatches, 2)
    return stage_memory(costs_of_rows(*lean, largest=largest), (0, 1), bucket, remat)


def test_rows_add_up_but_for_their_temporaries() -> None:
    """Those of B are beside what the upper row hands down."""
    assert held() == StageMemory(
        fixed=12_000,
        saved=150,
        kept=17,
        tape=50,
        input=4,
        output=6,
        scratch_forward=60,
        scratch_backward=5 + 150,
        scratch_weight=0,
        gradient=4000,
    )


def test_the_chunks_of_a_row_are_joined_before_those_of_the_next() -> None:
    assert held(chunks=3) == held()._replace(scratch_weight=3 * (7 + 30))


def test_what_is_joined_may_lie_where_another_rows_gradient_will() -> None:
    """Of the second row the tape alone, so the first one's joined arrays are the larger ones then."""
    assert held(chunks=3, largest=90) == held()._replace(scratch_weight=3 * (10 + 20))
    assert held(chunks=3, largest=89) == held(chunks=3)
    assert held(chunks=3, microbatches=2, largest=90) == held(chunks=3, microbatches=2)


def test_where_microbatches_are_added_a_row_makes_its_own_gradient_first() -> None:
    assert held(microbatches=2) == held()._replace(scratch_add=900)
    assert held(chunks=3, microbatches=2) == held(chunks=3)._replace(scratch_add=3 * (10 + 20) + 900 - 3 * (7 + 30))


@pytest.mark.parametrize(
    ("remat", "inputs", "scratch"),
    [
        # The zeros of one row's scan; of the larger row (100 + 1 + 30 against 50 + 150) what F saves and B needs.
        ("layer", 5, 20 + 50 + 150),
        ("stage", 0, 150 + 150),
    ],
)
def test_what_remat_moves_into_backward_is_joined_as_before(remat: str, inputs: int, scratch: int) -> None:
    """B makes what W reads; of what F would have saved, a row's, or all rows', is there while B runs."""
    moved = held()._replace(saved=0, kept=inputs, tape=50 + 17, scratch_backward=scratch)
    assert held(remat=remat) == moved
    assert held(remat=remat, chunks=3) == moved._replace(scratch_weight=3 * (7 + 30))


def test_temporaries_of_f_that_do_not_fit_beside_those_of_b() -> None:
    """Of the first row alone: 60 bytes, of which its tape and what it keeps have room for 30."""
    for remat in ("layer", "stage"):
        assert stage_memory(costs_of_rows(), (0,), BucketPlan(4, 4, 1, 1, 2), remat).scratch_backward == 100 + 1 + 30


def test_a_lean_row_keeps_what_it_needs() -> None:
    """W of it has other temporaries than the gradient. With "layer" F of the other row alone runs again in B."""
    assert held(1, remat="head") == held()._replace(scratch_weight=500)
    assert held(1, remat="head", microbatches=2) == held()._replace(scratch_weight=500, scratch_add=3000)
    moved = held()._replace(saved=50, kept=5 + 7, tape=50 + 10, scratch_backward=20 + 150, scratch_weight=500)
    assert held(1, remat="layer") == moved
    assert held(1, remat="stage") == held(remat="stage")._replace(scratch_weight=500)


def test_which_rows_run_again() -> None:
    found = {remat: run_again(costs_of_rows(1), remat, (0, 1)) for remat in ("none", "head", "layer", "stage")}
    assert found == {"none": [False] * 2, "head": [False] * 2, "layer": [True, False], "stage": [True] * 2}
