"""Notes come back from JSON as they were, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mp_lstm.training.metrics import Sums
from mp_lstm.training.notes import LastStep, Notes, Validation, notes_from_json

FULL = Notes(
    position=(1, 7),
    sums=Sums(12.5, 6.0, 6, 0.25),
    last=LastStep(9, 2, float("inf"), 1e-3),
    valid=Validation(9, 2.5, 12.18, 57),
    best=Validation(2, 2.25, 9.49, 57),
    at_end=Validation(9, 2.5, 12.18, 57),
    plateau=2.25,
    losses=(3.0, 2.5),
    averages=True,
    waited=1,
    metrics_size=1234,
    seconds=3.5,
)


@pytest.mark.parametrize("notes", [Notes(), FULL])
def test_notes_come_back(notes: Notes) -> None:
    again = notes_from_json(json.loads(json.dumps(notes._asdict())))
    assert again == notes
    assert [type(value) for value in again] == [type(value) for value in notes]


def test_a_note_that_was_not_yet_known_is_as_in_a_new_run() -> None:
    assert notes_from_json({"seconds": 2}) == Notes(seconds=2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bast", None, "bast"),
        ("position", 7, "position of the notes is 7"),
        ("position", [1, 2, 3], "position of the notes has 3 of 2 parts"),
        ("position", [1, None], "position of the notes is or holds None"),
        ("position", [1, 0.5], "position of the notes is or holds 0.5"),
        ("sums", None, "sums of the notes is None"),
        ("last", [1, 2], "last of the notes has 2 of 4 parts"),
        ("best", "abcd", "best of the notes is 'abcd'"),
        ("losses", [1.5, "a"], "losses of the notes is or holds 'a'"),
        ("averages", 1, "averages of the notes is or holds 1"),
        ("waited", True, "waited of the notes is or holds True"),
    ],
)
def test_notes_that_are_damaged_are_refused(name: str, value: Any, message: str) -> None:
    """They were taken as they came, and failed later, or never; an unknown name was a traceback."""
    with pytest.raises((ValueError, KeyError), match=message):
        notes_from_json({**Notes()._asdict(), name: value})
