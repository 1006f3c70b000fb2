"""The type checker that `conftest.py` puts on every function of the annotated rooms: beartype, with one exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# An int is accepted where a float is wanted, as type checkers have it.
CONFIGURATION = BeartypeConf(is_pep484_tower=True)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks arguments and result of a function against its annotations.

    Constructors of dataclasses are left alone: `jax.tree.map` rebuilds a dataclass through its constructor around
    whatever the mapped function returned (shapes, shardings, float0 gradients), which no annotation of a field allows.
    """
    return function if function.__name__ == "__init__" else beartype(conf=CONFIGURATION)(function)
