"""What follows a walk's last W: norms, U, and the copies that stages lend each other.

    square norms   each stage -> last stage      their root, and the mean loss, there
    norm           last stage -> each stage      U updates the stage's own rows
    lent           owner -> borrower             of tied parameters, anew after every update

Averages of parameters are started and taken here too: like U, they are programs over what a stage holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mp_lstm.layers.base import Params
from mp_lstm.layers.model import ties_from_below
from mp_lstm.runtime import average as averages
from mp_lstm.runtime import optimizer as optimizers
from mp_lstm.runtime.engine import Engine
from mp_lstm.runtime.placement import everywhere, transfer
from mp_lstm.runtime.stages import Stage
from mp_lstm.runtime.state import Metrics, StageState
from mp_lstm.runtime.walk import Walk


def finish(
    walk: Walk, states: Sequence[StageState], rate: float, *, donate: bool, compile_only: bool = False
) -> tuple[tuple[StageState, ...], Metrics]:
    """Enqueues norms and U.

    Args:
      walk: after its last W, lent gradients sent home.
      states: what each stage held; consumed where `donate`.
      rate: factor on the updates.

    Returns:
      What each stage holds now, and the window's metrics.
    """
    engine, window = walk.engine, walk.window
    run, last = functools.partial(engine.run, compile_only=compile_only), engine.stages[-1]
    squares = [
        run(stage, "square_norm", None, _square_norm(stage), (walk.gradients_of(stage).own,)) for stage in engine.stages
    ]
    squares = tuple(transfer(square, last.sharding, f"the norm of stage {s}") for s, square in enumerate(squares))
    args = (squares, window.denominators[-1], walk.total, window.weight_scalar)
    norm, loss = run(last, "norm", None, optimizers.norm_and_loss, args)
    own, optimizer = [], []
    for stage, held in zip(engine.stages, states, strict=True):
        sent, factor = transfer(norm, stage.sharding, "the global norm"), engine.constants.factor(stage, float(rate))
        denominator = window.denominators[stage.number]
        args = (held.own, held.optimizer, walk.gradients_of(stage).own, sent, denominator, factor)
        params, state = run(stage, "update", None, stage.update, args, donate=(0, 1) if donate else ())
        own.append(params)
        optimizer.append(state)
    loss, norm, squares = everywhere((loss, norm, squares), "the loss")
    metrics = Metrics(loss, window.weight, window.tokens, norm, squares)
    return tuple(map(StageState, own, optimizer, lend_parameters(engine, own))), metrics


def _square_norm(stage: Stage) -> Callable[[Params], jax.Array]:
    return functools.partial(optimizers.square_norm, flat=stage.sharding.num_devices == 1)


def lend_parameters(engine: Engine, own: Sequence[Params]) -> list[tuple[Params, ...]]:
    """What each stage is lent by others, as copies: an owner's update must not take their memory."""
    lent = []
    for stage in engine.stages:
        parts = []
        for tie in ties_from_below(engine.model, stage.rows):
            owner = next(other for other in engine.stages if tie.owner in other.rows)
            parts.append(_copy(engine, owner, own[owner.number][tie.owner - owner.rows.start], stage))
        lent.append(tuple(parts))
    return lent


def start_averages(
    engine: Engine, states: Sequence[StageState], *, compile_only: bool = False
) -> tuple[StageState, ...]:
    """Switches each stage's average on."""
    run = functools.partial(engine.run, compile_only=compile_only)
    return tuple(
        held._replace(optimizer=run(stage, "start average", None, averages.started, (held.optimizer,)))
        for stage, held in zip(engine.stages, states, strict=True)
    )


def averages_of(engine: Engine, states: Sequence[StageState], *, compile_only: bool = False) -> tuple[StageState, ...]:
    """What each stage holds, with the average as its parameters."""
    run = functools.partial(engine.run, compile_only=compile_only)
    found = [
        run(stage, "average", None, averages.averaged, (held.own, held.optimizer))
        for stage, held in zip(engine.stages, states, strict=True)
    ]
    own, optimizer = zip(*found, strict=True)
    return tuple(map(StageState, own, optimizer, lend_parameters(engine, own)))


def _copy(engine: Engine, owner: Stage, params: Params, borrower: Stage) -> Params:
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    copied = engine.run(owner, "lend", None, _copied, (params,), compile_only=abstract)
    return transfer(copied, borrower.sharding, f"what stage {owner.number} lends stage {borrower.number}")


def _copied(params: Params) -> Params:
    """Copies: a program returns no input as it is, so the barrier makes new arrays of them."""
    return jax.tree.map(jnp.copy, params)
