"""What a user's function must give, checked when it is traced: a pair, a state like the one before, one number.

Without it, what is wrong shows far from the function and names no layer: where two programs of a pipeline do not fit,
or in JAX's derivative.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mp_lstm.errors import InputError
from mp_lstm.layers.checks import described


def pair(what: str, given: Any, wanted: str) -> tuple[Any, Any]:
    """The two parts of a result.

    Args:
      what: gave it, for the message.
      given: the result.
      wanted: the names of its parts.

    Raises:
      InputError: it is no pair.

    Example:
      >>> pair("dense: its function", ((), 3), "(state, y)")
      ((), 3)
    """
    if not isinstance(given, tuple | list) or len(given) != 2:
        got = f"a {type(given).__name__} of {len(given)}" if isinstance(given, tuple | list) else described(given)
        raise InputError(f"{what} gave {got}, wanted a pair {wanted}: return both, and () where there is no state")
    first, second = given
    return first, second


def check_kept(what: str, after: Any, before: Any) -> None:
    """Raises InputError for a state that is not like the one it follows.

    Args:
      what: gave it, for the message.
      after, before: the states.
    """
    if wrong := difference(after, before):
        raise InputError(f"{what} gave a state that {wrong}: return one like that it is given, which init_state made")


def check_number(what: str, given: Any, wanted: str) -> None:
    """Raises InputError for what is no single floating number.

    Args:
      what: gave it, for the message.
      given: the result.
      wanted: what it should be.
    """
    is_number = isinstance(given, float | np.floating | jax.Array | np.ndarray) and np.shape(given) == ()
    if not is_number or not jnp.issubdtype(jnp.result_type(given), jnp.floating):
        raise InputError(f"{what} gave {described(given)}, wanted one floating number: return {wanted}")


def difference(got: Any, wanted: Any) -> str | None:
    """What tells a tree of arrays from another, in structure, shapes or types, in words; None where nothing does.

    Args:
      got: with arrays of JAX, of the host (in the types that JAX gives them), or what stands for arrays.
      wanted: likewise.

    Example:
      >>> difference({"h": np.zeros(3)}, {"h": np.zeros(2)})
      "is float32 [3] at ['h'], wanted float32 [2]"
    """
    (leaves, found), (models, right) = jax.tree.flatten(got), jax.tree.flatten(wanted)
    if found.num_leaves != right.num_leaves:
        return f"has {found.num_leaves} arrays, wanted {right.num_leaves}"
    if found != right:
        return f"has the structure {found}, wanted {right}"
    for i, (a, b) in enumerate(zip(leaves, models, strict=True)):
        if not _alike(a, b):
            path = jax.tree_util.keystr(jax.tree.leaves_with_path(got)[i][0])
            return f"is {_kind(a)}{f' at {path}' if path else ''}, wanted {_kind(b)}"
    return None


def _alike(a: Any, b: Any) -> bool:
    """Whether leaves are of one shape and type. The first comparison is quick, and nearly always enough."""
    try:
        return (a.shape == b.shape and a.dtype == b.dtype) or _kind(a) == _kind(b)
    except AttributeError:
        return _kind(a) == _kind(b)


def _kind(leaf: Any) -> str:
    """Type and shape of an array, the type alone of anything else."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = np.asarray(leaf)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return described(leaf)
    return f"{jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)} {list(leaf.shape)}"
