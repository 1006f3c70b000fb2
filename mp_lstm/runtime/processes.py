"""The processes of a run, and what they agree on before and beside the steps: names, decisions, meetings.

Words pass through the coordinator of `jax.distributed`, numbers of a step through `edges`. Alone, a process agrees with
itself at once. All processes call these functions, in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # of the client there is no public name

from mp_lstm.errors import InputError
from mp_lstm.runtime import edges, watchdog

PATIENCE = 24 * 3600 * 1000
"""Milliseconds that a process waits for another's word, unless the watchdog has less patience."""

_numbers = itertools.count()


def are_several() -> bool:
    """Whether this is one process of several.

    Example:
      >>> are_several()
      False
    """
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes and tells for all.

    Example:
      >>> is_first()
      True
    """
    return jax.process_index() == 0


def by_the_first(make: Callable[[], str]) -> str:
    """What the first process finds, in every process.

    Args:
      make: called in the first process only.

    Raises:
      InputError: the first process had one; it is raised in every process.

    Example:
      >>> by_the_first(lambda: "a word")
      'a word'
    """
    if not are_several():
        return make()
    key = f"mp_lstm/word/{next(_numbers)}"
    if not is_first():
        said = _word(key, "a word of process 0")
        if said.startswith("!"):
            raise InputError(said[1:])
        return said[1:]
    try:
        said = make()
    except InputError as error:
        _client().key_value_set(key, f"!{error}")
        raise
    _client().key_value_set(key, f" {said}")
    return said


def check_alike(what: str, value: str) -> None:
    """Raises InputError, in every process, where a process has another value than the first.

    Args:
      what: it is, for the message.
      value: this process's.

    Example:
      >>> check_alike("configuration", "any")
    """
    if not are_several():
        return
    key, own = f"mp_lstm/alike/{next(_numbers)}", jax.process_index()
    _client().key_value_set(f"{key}/{own}", value)
    others = [_word(f"{key}/{i}", f"the {what} of process {i}") for i in range(jax.process_count())]
    strangers = [i for i, other in enumerate(others) if other != others[0]]
    if strangers:
        raise InputError(
            f"process {strangers[0]} has another {what} than process 0: start all processes with the same command, "
            "version and files"
        )


def together(what: str, do: Callable[[], None]) -> None:
    """Has every process do its part, and waits for all of them.

    Args:
      what: it is.
      do: it.

    Raises:
      InputError: one of them had one; it is raised in every process.

    Example:
      >>> together("a word", lambda: print("done"))
      done
    """
    if not are_several():
        return do()
    key, said = f"mp_lstm/together/{next(_numbers)}", ""
    try:
        do()
    except InputError as error:
        said = str(error)
    _client().key_value_set(f"{key}/{jax.process_index()}", f" {said}")
    for i in range(jax.process_count()):
        if word := _word(f"{key}/{i}", f"{what} of process {i}")[1:]:
            raise InputError(word)
    return None


def meet(what: str) -> None:
    """Waits until every process is here.

    Args:
      what: they meet for.

    Example:
      >>> meet("the checkpoint")
    """
    if are_several():
        with watchdog.waiting(f"all processes before {what}"):
            _client().wait_at_barrier(f"mp_lstm/{what}/{next(_numbers)}", PATIENCE)


def largest(value: int) -> Any:
    """The largest of what the processes give, as a number on a device; waits for nothing.

    Args:
      value: from 0 to 127, this process's.

    Example:
      >>> int(largest(3))
      3
    """
    if not are_several():
        return value
    votes = np.zeros(jax.process_count(), np.int32)
    votes[jax.process_index()] = value
    like = jax.ShapeDtypeStruct(votes.shape, votes.dtype)
    return _largest(edges.summed(votes, like, "the signals"))


@jax.jit
def _largest(votes: Any) -> Any:
    return jnp.max(votes)


def _word(key: str, what: str) -> str:
    """What another process has said, or will say, under a key."""
    with watchdog.waiting(what):
        return str(_client().blocking_key_value_get(key, PATIENCE))


def _client() -> Any:
    return distributed.global_state.client
