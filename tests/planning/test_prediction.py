"""What a stage holds, worked out by hand from what its rows hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mp_lstm.planning.costs import RowMemory
from mp_lstm.planning.memory import StageMemory
from mp_lstm.planning.plan import BucketPlan
from mp_lstm.planning.prediction import stage_memory

ROWS = (
    RowMemory(
        parameters=1000,
        state=2000,
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


def held(*, chunks: int = 1, microbatches: int = 1, remat: str = "none") -> StageMemory:
    costs: Any = SimpleNamespace(memory=lambda row, rows, time: ROWS[row])
    return stage_memory(costs, (0, 1), BucketPlan(4 * chunks, 4, chunks, microbatches, 2), remat)


def test_rows_add_up_but_for_their_temporaries() -> None:
    assert held() == StageMemory(
        fixed=12_000,
        saved=150,
        kept=17,
        tape=50,
        input=4,
        output=6,
        scratch_forward=60,
        scratch_backward=150,
        scratch_weight=0,
        gradient=4000,
    )


def test_several_chunks_are_joined_and_several_microbatches_added() -> None:
    assert held(chunks=3) == held()._replace(scratch_weight=3 * (17 + 50))
    assert held(microbatches=2) == held()._replace(scratch_add=901)


@pytest.mark.parametrize("remat", ["layer", "stage"])
def test_what_remat_moves_into_backward_is_joined_as_before(remat: str) -> None:
    """B makes what W reads; of what F would have saved, a row's, or all rows', is there while B runs."""
    inputs, scratch = {"layer": (5, 2 + 50 + 150), "stage": (0, 150 + 150)}[remat]
    moved = held()._replace(saved=0, kept=inputs, tape=50 + 17, scratch_backward=scratch)
    assert held(remat=remat) == moved
    assert held(remat=remat, chunks=3) == moved._replace(scratch_weight=3 * (17 + 50))
