"""flax's nn.RNN with OptimizedLSTMCell, and optax: the step a user of JAX would write."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mp_lstm.launch import set_allocator
from peers.problem import LEARNING_RATE, MAX_NORM, Peer, Shape, Weights, batch_of, initial_weights, inputs_of

GATES = "ifgo"


class LanguageModel(nn.Module):
    """Embedding, LSTM layers and decoder, time-major."""

    shape: Shape

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [T, B, V] of tokens [T, B]."""
        x: Any = nn.Embed(self.shape.vocab, self.shape.embed, name="embed")(tokens)
        for number in range(1, self.shape.layers + 1):
            cell = nn.OptimizedLSTMCell(self.shape.hidden, name=f"cell_{number}")
            x = nn.RNN(cell, time_major=True, name=f"lstm_{number}")(x)
        return nn.Dense(self.shape.vocab, name="head")(x)


def to_flax(weights: Weights, shape: Shape) -> dict[str, Any]:
    """Our weights in flax's layout: one matrix a gate, the bias on the recurrent side."""
    tree: dict[str, Any] = {
        "embed": {"embedding": weights["embed"]},
        "head": {"kernel": weights["head kernel"], "bias": weights["head bias"]},
    }
    for number in range(1, shape.layers + 1):
        parts = [np.split(weights[f"lstm {number} {part}"], 4, axis=-1) for part in ("kernel", "recurrent", "bias")]
        cell: dict[str, Any] = {}
        for gate, kernel, recurrent, bias in zip(GATES, *parts, strict=True):
            cell[f"i{gate}"] = {"kernel": kernel}
            cell[f"h{gate}"] = {"kernel": recurrent, "bias": bias}
        tree[f"cell_{number}"] = cell
    return tree


def from_flax(tree: dict[str, Any], shape: Shape) -> Weights:
    """flax's parameters in our layout."""
    weights = {"embed": np.asarray(tree["embed"]["embedding"])}
    for number in range(1, len(inputs_of(shape)) + 1):
        cell = tree[f"cell_{number}"]
        for part, field, side in (("kernel", "kernel", "i"), ("recurrent", "kernel", "h"), ("bias", "bias", "h")):
            gates = [cell[f"{side}{gate}"][field] for gate in GATES]
            weights[f"lstm {number} {part}"] = np.concatenate(gates, axis=-1)
    return weights | {"head kernel": np.asarray(tree["head"]["kernel"]), "head bias": np.asarray(tree["head"]["bias"])}


def make(shape: Shape, *, allocator: bool = False) -> Peer:
    """One jitted step on donated parameters.

    Args:
      shape: model and batch.
      allocator: with our settings of malloc, which flax's users do not have.
    """
    if allocator:
        set_allocator()
    model = LanguageModel(shape)
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.sgd(LEARNING_RATE))
    params = jax.device_put(to_flax(initial_weights(shape), shape))
    state = optimizer.init(params)
    inputs, targets = map(jnp.asarray, batch_of(shape))

    def loss_of(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def update(params: Any, state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(params, inputs, targets)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, inputs, targets).compile()

    def step() -> float:
        nonlocal params, state
        params, state, loss = compiled(params, state, inputs, targets)
        jax.block_until_ready(params)
        return float(loss)

    return Peer(step, lambda: from_flax(params, shape))
