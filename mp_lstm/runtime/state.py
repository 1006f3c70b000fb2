"""What a pipeline's functions take and give: states and metrics, as values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Key

from mp_lstm.errors import InputError
from mp_lstm.layers.base import Params
from mp_lstm.layers.checks import described
from mp_lstm.layers.results import difference
from mp_lstm.runtime.placement import Elsewhere, Tree, put
from mp_lstm.runtime.stages import Stage


class StageState(NamedTuple):
    """What a stage holds between steps: parameters of its rows, an optimiser state a row, and what it is lent."""

    own: Params
    optimizer: Any
    lent: tuple[Params, ...]


@struct.dataclass
class State:
    """A pipeline's state: a value, replaced by every step.

    Args:
      key: training's key, from which dropout masks derive.
      stages: parameters, optimiser states and lent parameters of each stage, on its devices.
      carry: state carried from batch to batch, by stage; None before the first batch that carries.
      step: updates done.
      batches: batches seen.
      rate: factor on the optimiser's updates.
    """

    key: Key[Array, ""]
    stages: tuple[StageState, ...]
    carry: tuple[Tree, ...] | None = None
    step: int = 0
    batches: int = 0
    rate: float = 1.0


def check_state(state: Any, stages: Sequence[Stage], params: Params) -> None:
    """Raises InputError for a state that is used up, or that is another pipeline's. It waits for no device.

    Args:
      state: as it was given.
      stages: of the pipeline.
      params: structs of the model's parameters, one entry a row.
    """
    if not isinstance(state, State):
        raise InputError(f"got a {type(state).__name__} for a state: pass what pipe.init, load or step returned")
    remedy = "pass one of this pipeline, which pipe.load(params, key=state.key) makes of any parameters"
    if len(state.stages) != len(stages):
        raise InputError(f"the state has {len(state.stages)} stages, the pipeline has {len(stages)}: {remedy}")
    for stage, held in zip(stages, state.stages, strict=True):
        wanted = params[stage.rows.start : stage.rows.stop]
        leaves, structs = jax.tree.leaves(held.own), jax.tree.leaves(wanted)
        if [leaf.shape for leaf in leaves] != [struct.shape for struct in structs]:
            raise InputError(f"the state has parameters of another model in stage {stage.number}: {remedy}")
        for leaf in leaves[:1]:  # a stage's are donated and placed together
            if not isinstance(leaf, Elsewhere | jax.Array):
                raise InputError(
                    f"the state has {described(leaf)} of the host in stage {stage.number}: {remedy}, or pass the "
                    "parameters to pipe.load"
                )
            if not isinstance(leaf, Elsewhere) and leaf.is_deleted():
                raise InputError(
                    "the state is used up, a step took its memory: go on with the state that step returned, or make "
                    "the pipeline with donate=False"
                )
            if not _same_place(leaf.sharding, stage.sharding):
                got, there = map(_arrangement, (leaf.sharding, stage.sharding))
                raise InputError(f"the state has stage {stage.number} on {got}, the pipeline on {there}: {remedy}")


def checked_carry(
    carry: Any, stages: Sequence[Stage], initial: Sequence[Tree], names: Sequence[str]
) -> tuple[Tree, ...]:
    """The carry of all stages, each one's on its devices, if it is like the initial one. It waits for no device.

    Args:
      carry: as it was given.
      stages: of the pipeline.
      initial: the state of each stage before the first step.
      names: of the model's rows.

    Raises:
      InputError: it is for another number of stages, or another structure, other shapes or types.
    """
    remedy = "pass what the call before returned for as many rows, or None to begin anew"
    if not isinstance(carry, tuple | list) or len(carry) != len(stages):
        got = f"{len(carry)} parts" if isinstance(carry, tuple | list) else described(carry)
        raise InputError(f"carry is {got}, wanted one part for each of {len(stages)} stages: {remedy}")
    for stage, part, wanted in zip(stages, carry, initial, strict=True):
        if wrong := difference(part, wanted):
            rows = ", ".join(names[stage.rows.start : stage.rows.stop])
            raise InputError(f"carry of stage {stage.number} ({rows}) {wrong}: {remedy}")
    return tuple(_on(stage, part) for stage, part in zip(stages, carry, strict=True))


def _on(stage: Stage, tree: Tree) -> Tree:
    """A tree of arrays with those on the stage's devices that are elsewhere, as a host's."""

    def of(leaf: Any) -> Any:
        there = isinstance(leaf, Elsewhere) or getattr(leaf, "sharding", None) == stage.sharding
        return leaf if there else put(leaf, stage.sharding)

    return jax.tree.map(of, tree)


def _same_place(a: Any, b: Any) -> bool:
    """Whether two shardings are of the same devices, and these arranged alike."""
    return a.device_set == b.device_set and (a.num_devices == 1 or a.mesh == b.mesh)


def _arrangement(sharding: Any) -> str:
    """The devices of an array, and how they are arranged where there are several."""
    if sharding.num_devices == 1:
        return str(list(map(str, sharding.device_set)))
    return f"{list(map(str, sharding.mesh.devices.flat))} as {dict(sharding.mesh.shape)}"


def check_key(key: Any) -> None:
    """Raises InputError for what is no typed key."""
    if not isinstance(key, jax.Array) or key.shape != () or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        got = f"{key.dtype} {list(key.shape)}" if isinstance(key, jax.Array) else repr(key)
        raise InputError(f"the key is {got}, a typed one is wanted: pass jax.random.key(seed)")


class Metrics(NamedTuple):
    """What a step or an evaluation found; device scalars, so that nothing waits until they are read.

    Args:
      loss: mean loss a unit of weight.
      weight: sum of the weights; tokens: number of steps that counted.
      grad_norm: global norm of the gradient before clipping; None in an evaluation.
      square_norms: each stage's part of it, before normalisation.
      carry: state after the batch, in an evaluation with carried state.
    """

    loss: Float[Array, ""]
    weight: float
    tokens: int
    grad_norm: Float[Array, ""] | None = None
    square_norms: tuple[Float[Array, ""], ...] = ()
    carry: tuple[Tree, ...] | None = None

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; waits for the device."""
        loss = float(self.loss)
        return math.exp(loss) if loss < 700 else math.inf

    def not_finite(self) -> list[int]:
        """Stages whose gradient is not finite, the last one too where the loss is not; waits for the device."""
        bad = [s for s, square in enumerate(self.square_norms) if not math.isfinite(float(square))]
        last = len(self.square_norms) - 1
        return bad if math.isfinite(float(self.loss)) or last in bad else [*bad, last]
