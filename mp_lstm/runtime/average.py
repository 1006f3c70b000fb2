"""The average of parameters over updates, as an optax transformation.

It changes no update and looks at parameters alone, so it stands beside any optimizer, treats each leaf alone, and knows
nothing of the rate factor. Transformations see parameters before their update; so what is kept lags one behind, and
`average` adds the last ones when they are asked for.

    updates since it was switched on    0     1     2        3
    kept                                -     -     p1       (p1 + p2) / 2
    parameters                          p0    p1    p2       p3
    average                             p0    p1    mean     mean of p1 .. p3

A flag in the state switches it on, so nothing is compiled anew: training decides when. torch.optim.ASGD leaves p1 out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from mp_lstm.layers.base import Params

OFF = -1


class AverageState(NamedTuple):
    """Updates since the average was switched on, `OFF` before; and the mean of parameters, the last ones left out."""

    updates: Int[Array, ""]
    mean: Params


def average_parameters(*, on: bool = False) -> optax.GradientTransformation:
    """Keeps the average of parameters over updates; the updates themselves pass unchanged.

    A pipeline evaluates it with `pipe.evaluate(state, batch, params="average")`, and switches it on with
    `pipe.start_average(state)`.

    Args:
      on: average from the first update on.

    Returns:
      The transformation, to be chained after an optimizer.

    References:
      Polyak and Juditsky 1992, https://doi.org/10.1137/0330046; as AWD-LSTM uses it, with a constant rate: Merity,
      Keskar and Socher 2017, https://arxiv.org/abs/1708.02182.

    Example:
      >>> import jax.numpy as jnp, optax, mp_lstm
      >>> optimizer = optax.chain(optax.sgd(1.0), mp_lstm.average_parameters(on=True))
      >>> params = jnp.asarray(4.0)
      >>> state = optimizer.init(params)
      >>> for gradient in (1.0, 2.0):
      ...     updates, state = optimizer.update(jnp.asarray(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params), float(average(params, state))
      (1.0, 2.0)
    """

    def init(params: Params) -> AverageState:
        return AverageState(jnp.asarray(0 if on else OFF, jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Params | None = None) -> tuple[Any, AverageState]:
        if params is None:
            raise ValueError("average_parameters averages parameters: pass them to update")
        seen = jnp.maximum(state.updates, 1)
        mean = jax.tree.map(
            lambda mean, now: jnp.where(state.updates > 0, mean + (now - mean) / seen.astype(now.dtype), mean),
            state.mean,
            params,
        )
        return updates, AverageState(state.updates + (state.updates >= 0), mean)

    return optax.GradientTransformation(init, update)


def find(state: Any) -> AverageState | None:
    """The average's state within an optimizer's state, None where it keeps none."""
    found = [leaf for leaf in jax.tree.leaves(state, is_leaf=_is_average) if _is_average(leaf)]
    return found[0] if found else None


def started(state: Any, updates: int = 0) -> Any:
    """An optimizer's state with its average switched on, or `OFF`."""

    def replaced(leaf: Any) -> Any:
        # Arrays of their own: a step donates them.
        return leaf._replace(updates=leaf.updates * 0 + updates) if _is_average(leaf) else leaf

    return jax.tree.map(replaced, state, is_leaf=_is_average)


def average(params: Params, state: Any) -> Params:
    """The average of parameters, those of now included; those of now where none is switched on."""
    kept = find(state)
    assert kept is not None, "callers ask `find` first"
    weight = jnp.maximum(kept.updates, 1)

    def mean(now: Array, before: Array) -> Array:
        return jnp.where(kept.updates > 1, before + (now - before) / weight.astype(now.dtype), now)

    return jax.tree.map(mean, params, kept.mean)


def averaged(params: tuple[Params, ...], states: tuple[Any, ...]) -> tuple[tuple[Params, ...], tuple[Any, ...]]:
    """The averages of a stage's rows, and the optimizer's states beside which they are the parameters."""
    return tuple(map(average, params, states)), started(states, OFF)


def _is_average(leaf: Any) -> bool:
    return isinstance(leaf, AverageState)
