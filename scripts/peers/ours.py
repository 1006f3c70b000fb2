"""This project's pipeline as a contender, on one emulated device or several."""

from __future__ import annotations

from typing import Any

import jax
import optax

import mp_lstm
from mp_lstm.launch import set_allocator
from peers.problem import LEARNING_RATE, MAX_NORM, Peer, Shape, Weights, batch_of, initial_weights, weight_shapes


def make(
    shape: Shape, *, devices: int = 1, unroll: int = 1, products: str | None = None, plan: dict[str, Any] | None = None
) -> Peer:
    """A pipeline on emulated devices of its own.

    Args:
      shape: model and batch.
      devices: how many to emulate.
      unroll: of the scans.
      products: the type to which operands of matrix products are rounded; None: as they are.
      plan: arguments of `make_plan`; what is not given is chosen.
    """
    set_allocator()
    mp_lstm.emulate_devices(devices)
    return on_devices(shape, jax.devices(), unroll=unroll, products=products, plan=plan)


def on_devices(
    shape: Shape,
    devices: list[Any],
    *,
    unroll: int = 1,
    products: str | None = None,
    plan: dict[str, Any] | None = None,
) -> Peer:
    """A pipeline on the given devices."""
    sizes: dict[str, Any] = {"vocab": shape.vocab, "embed": shape.embed, "hidden": shape.hidden, "layers": shape.layers}
    model = mp_lstm.language_model(**sizes, unroll=unroll, products=products)
    options: dict[str, Any] = {"batch_size": shape.batch_size, "lengths": (shape.time,), "devices": devices}
    chosen = mp_lstm.make_plan(model, **options, **(plan or {}))
    pipe = mp_lstm.make_pipeline(model, chosen, optax.sgd(LEARNING_RATE), max_norm=MAX_NORM)
    structure = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
    state = pipe.load(jax.tree.unflatten(structure, list(initial_weights(shape).values())))
    window = pipe.place(mp_lstm.Batch(*batch_of(shape)))

    def step() -> float:
        nonlocal state
        state, metrics = pipe.step(state, window)
        jax.block_until_ready(state)
        return float(metrics.loss)

    def params() -> Weights:
        return dict(zip(weight_shapes(shape), jax.tree.leaves(pipe.params(state)), strict=True))

    return Peer(step, params, describe(chosen, shape.time))


def describe(plan: mp_lstm.Plan, length: int) -> str:
    """The plan in a few words."""
    bucket = plan.buckets[length]
    partition = "+".join(map(str, plan.partition))
    cut = f"{bucket.chunks} x {bucket.chunk} steps, {bucket.microbatches} micro-batches"
    return f"{partition} rows, {plan.schedule_name}, {cut}" if len(plan.partition) > 1 else ""
