"""Makes a pipeline: checks that model, plan, optimiser and options fit, and builds the stages."""

from __future__ import annotations

from typing import SupportsIndex

import jax
import jax.numpy as jnp
import optax

from mp_lstm.errors import InputError
from mp_lstm.layers.model import Model
from mp_lstm.planning.checks import LEAST, positive, within
from mp_lstm.planning.plan import Plan
from mp_lstm.runtime import optimizer as optimizers
from mp_lstm.runtime.constants import Constants
from mp_lstm.runtime.engine import Engine
from mp_lstm.runtime.pipeline import Pipeline
from mp_lstm.runtime.programs import Programs
from mp_lstm.runtime.stages import make_stage

NORMALIZE = ("tokens", "rows")


def make_pipeline(
    model: Model,
    plan: Plan,
    optimizer: optax.GradientTransformation,
    *,
    max_norm: float | None = None,
    normalize: str = "tokens",
    every_k: SupportsIndex = 1,
    donate: bool = True,
) -> Pipeline:
    """Puts a model on a plan's devices.

    Args:
      model: the model the plan was made for.
      plan: partition, devices, buckets and schedules.
      optimizer: a leaf-wise optax transformation; each row has a state of its own.
      max_norm: the gradient is scaled so that its norm over all stages is at most this; None: it is not.
      normalize: divide gradient sums by the real "tokens" of the window (its weights), or by its real "rows".
      every_k: batches in a window, that is for one update; the last window of an epoch may have fewer.
      donate: whether `step` consumes the state it is given, and so saves a copy of all parameters.

    Returns:
      The pipeline.

    Raises:
      InputError: the plan is for another model, or its devices are not JAX's; the optimizer is none or mixes leaves;
        an option is out of range.

    Example:
      >>> import jax, mp_lstm, numpy as np, optax
      >>> model = mp_lstm.language_model(vocab=50, embed=4, hidden=8, layers=2)
      >>> plan = mp_lstm.make_plan(model, batch_size=4, lengths=(8,), devices=jax.devices()[:1])
      >>> pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1), max_norm=5.0)
      >>> state = pipe.init(jax.random.key(0))
      >>> state, metrics = pipe.step(state, mp_lstm.Batch(np.zeros((8, 4), int), np.ones((8, 4), int)))
      >>> metrics.tokens, state.step
      (32, 1)
    """
    names = [row.name for row in plan.rows]
    if names != [row.name for row in model.rows]:
        raise InputError(
            f"the plan is for rows {names}, the model has {[row.name for row in model.rows]}: make a plan for it"
        )
    sizes = [(row.parameters, layer.cost(1, 1).parameters) for row, layer in zip(plan.rows, model.rows, strict=True)]
    if other := [name for name, (planned, own) in zip(names, sizes, strict=True) if planned != own]:
        planned, own = sizes[names.index(other[0])]
        raise InputError(
            f"the plan is for a model whose {other[0]} has {planned:,} parameters, this one's has {own:,}: make a plan "
            "for it"
        )
    if normalize not in NORMALIZE:
        raise InputError(f"normalize is {normalize!r}, one of {', '.join(NORMALIZE)} is wanted")
    if max_norm is not None:
        max_norm = within("max_norm", max_norm, "a positive number or None", least=LEAST)
    window = positive("every_k", every_k)
    optimizers.check_leafwise(optimizer)
    stages = tuple(
        make_stage(model, i, rows, device, optimizer, max_norm=max_norm, remat=plan.remat)
        for i, (rows, device) in enumerate(zip(plan.stages, plan.devices, strict=True))
    )
    params = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    constants = Constants(jnp.result_type(*(leaf.dtype for leaf in params)))
    engine = Engine(model, stages, Programs(program_bound(plan)), constants)
    return Pipeline(engine, plan, optimizer, normalize=normalize, every_k=window, donate=donate)


def program_bound(plan: Plan) -> int:
    """Largest number of programs that batches of one structure need.

    Each stage has one program for each distinct unit shape in F, B (two: the first of a micro-batch and the next) and
    evaluation, one for each distinct joined shape in W (two: the first of a window and the next), and one for each
    distinct row split to take the carried state apart and together; and the same few of every plan: prepared
    parameters, norm, update, lending, the average of parameters.
    """
    buckets = plan.buckets.values()
    units = len({(bucket.chunk, bucket.rows_per_microbatch) for bucket in buckets})
    joined = len({(bucket.chunk, bucket.chunks, bucket.rows_per_microbatch) for bucket in buckets})
    splits = len({bucket.microbatches for bucket in buckets})
    return len(plan.stages) * (4 * units + 2 * joined + 2 * splits + 8) + 2
