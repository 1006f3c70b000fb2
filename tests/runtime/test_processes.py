"""What processes agree on, with a coordinator of our own; distributed/ has it with JAX's."""

from __future__ import annotations

import re

import pytest

from mp_lstm.errors import InputError
from mp_lstm.runtime import processes


def test_what_the_first_finds_all_have(process):
    process(0)
    assert processes.by_the_first(lambda: "runs/austen-1") == "runs/austen-1"
    process(1)
    assert processes.by_the_first(lambda: "another") == "runs/austen-1"


def test_what_the_first_refuses_all_refuse(process):
    def refuse() -> str:
        raise InputError("the disk is full: make room")

    for number in (0, 1):
        process(number)
        with pytest.raises(InputError, match="the disk is full: make room"):
            processes.by_the_first(refuse)


def test_what_one_refuses_all_refuse(process):
    def refuse() -> None:
        raise InputError("the disk is full: make room")

    process(0)
    with pytest.raises(KeyError):  # the other has said nothing yet
        processes.together("the checkpoint", lambda: None)
    for number, do in ((1, refuse), (0, lambda: None)):
        process(number)
        with pytest.raises(InputError, match="the disk is full: make room"):
            processes.together("the checkpoint", do)


def test_another_configuration_is_refused(process):
    process(0)
    with pytest.raises(KeyError):
        processes.check_alike("plan", "two stages")
    process(1)
    message = "process 1 has another plan than process 0: start all processes with the same command, version and files"
    with pytest.raises(InputError, match=re.escape(message)):
        processes.check_alike("plan", "three stages")
