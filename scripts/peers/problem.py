"""The work that all contenders do: a language model's shape, its initial weights and its tokens.

Weights have our names and layout: kernels [inputs, 4H] with gate columns i, f, g, o, one bias a layer. Each contender
takes them into its own layout and gives its parameters back in this one. numpy alone, so that no contender pays for
another's library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Weights = dict[str, np.ndarray]
LEARNING_RATE = 0.1
MAX_NORM = 5.0
SCALE = 0.1
"""Initial weights are uniform between -SCALE and SCALE."""


class Shape(NamedTuple):
    """A model of `layers` LSTM layers, and batches of `batch_size` rows of `time` steps."""

    embed: int
    hidden: int
    layers: int
    vocab: int
    batch_size: int
    time: int


class Peer(NamedTuple):
    """A contender: one training step that returns its loss, its parameters in our layout, and what it is."""

    step: Callable[[], float]
    params: Callable[[], Weights]
    about: str = ""


class Product(NamedTuple):
    """`number` matrix products a training step, [repeats, rows, inner] @ [inner, columns] each.

    Repeats above 1 come one after the other, as the steps of a recurrence do.
    """

    rows: int
    inner: int
    columns: int
    number: int
    repeats: int = 1


def inputs_of(shape: Shape) -> list[int]:
    """The input size of every LSTM layer."""
    return [shape.embed] + [shape.hidden] * (shape.layers - 1)


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, in the model's order."""
    gates = 4 * shape.hidden
    shapes: dict[str, tuple[int, ...]] = {"embed": (shape.vocab, shape.embed)}
    for number, inputs in enumerate(inputs_of(shape), 1):
        shapes[f"lstm {number} kernel"] = (inputs, gates)
        shapes[f"lstm {number} recurrent"] = (shape.hidden, gates)
        shapes[f"lstm {number} bias"] = (gates,)
    return shapes | {"head kernel": (shape.hidden, shape.vocab), "head bias": (shape.vocab,)}


def initial_weights(shape: Shape, seed: int = 0) -> Weights:
    """The weights that everyone starts from."""
    draw = np.random.default_rng(seed)
    return {
        name: (2 * SCALE * draw.random(size, np.float32) - SCALE).astype(np.float32)
        for name, size in weight_shapes(shape).items()
    }


def batch_of(shape: Shape, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets [T, B]: speed does not depend on which tokens they are."""
    tokens = np.random.default_rng(seed).integers(0, shape.vocab, (shape.time + 1, shape.batch_size)).astype(np.int32)
    return tokens[:-1], tokens[1:]


def products(shape: Shape) -> list[Product]:
    """The matrix products that no training step can do without: F, B and W of every layer and of the head."""
    rows, hidden, gates = shape.time * shape.batch_size, shape.hidden, 4 * shape.hidden
    found = []
    for inputs in sorted(set(inputs_of(shape))):
        number = inputs_of(shape).count(inputs)
        found += [
            Product(rows, inputs, gates, number),  # F: x K
            Product(rows, gates, inputs, number),  # B: dz K^T
            Product(inputs, rows, gates, number),  # W: x^T dz
        ]
    return [
        *found,
        Product(shape.batch_size, hidden, gates, shape.layers, shape.time),  # F: h R, step by step
        Product(shape.batch_size, gates, hidden, shape.layers, shape.time),  # B: dz R^T, step by step
        Product(hidden, rows, gates, shape.layers),  # W: h^T dz
        Product(rows, hidden, shape.vocab, 1),
        Product(rows, shape.vocab, hidden, 1),
        Product(hidden, rows, shape.vocab, 1),
    ]


def operations(shape: Shape) -> float:
    """Floating point operations of these products."""
    return sum(2.0 * p.rows * p.inner * p.columns * p.number * p.repeats for p in products(shape))


def disagreement(found: Weights, reference: Weights, initial: Weights) -> tuple[float, float]:
    """How far parameters are from the reference's.

    Returns:
      The largest error of a tensor, relative to its largest entry; and the error of the whole change since the start,
      relative to that change, which a contender that does not train cannot pass.

    Raises:
      ValueError: the parameters are not the same ones.
    """
    if {name: w.shape for name, w in found.items()} != {name: w.shape for name, w in reference.items()}:
        raise ValueError(f"parameters {sorted(found)} of other names or shapes than {sorted(reference)}")
    errors, wrong, change = [], 0.0, 0.0
    for name, wanted in reference.items():
        difference = found[name].astype(np.float64) - wanted
        errors.append(float(abs(difference).max() / abs(wanted).max()))
        wrong += float((difference**2).sum())
        change += float(((wanted.astype(np.float64) - initial[name]) ** 2).sum())
    return max(errors), float(np.sqrt(wrong / change))


def describe(shape: Shape) -> str:
    """The shape in words."""
    return (
        f"{shape.layers} x {shape.hidden}, embedding {shape.embed}, vocabulary {shape.vocab:,}, "
        f"{shape.batch_size} rows of {shape.time} steps"
    )
