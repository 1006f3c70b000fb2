"""PyTorch's nn.LSTM in one process, on one thread or several.

nn.LSTM has two biases that only ever appear as a sum: the recurrent one is zero and stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from peers.problem import LEARNING_RATE, MAX_NORM, Peer, Shape, Weights, batch_of, initial_weights, inputs_of

PARTS = {"kernel": "weight_ih", "recurrent": "weight_hh", "bias": "bias_ih"}


def lstm_layers(shape: Shape, weights: Weights, numbers: Sequence[int]) -> nn.LSTM:
    """Consecutive LSTM layers (numbered from 1) with our weights."""
    lstm = nn.LSTM(inputs_of(shape)[numbers[0] - 1], shape.hidden, len(numbers))
    with torch.no_grad():
        for place, number in enumerate(numbers):
            for part, name in PARTS.items():
                getattr(lstm, f"{name}_l{place}").copy_(torch.from_numpy(weights[f"lstm {number} {part}"].T))
            unused = getattr(lstm, f"bias_hh_l{place}")
            unused.zero_()
            unused.requires_grad_(False)
    return lstm


def lstm_weights(lstm: nn.LSTM, numbers: Iterable[int]) -> Weights:
    """Their parameters in our layout."""
    return {
        f"lstm {number} {part}": to_numpy(getattr(lstm, f"{name}_l{place}")).T
        for place, number in enumerate(numbers)
        for part, name in PARTS.items()
    }


def embedding(weights: Weights) -> nn.Embedding:
    """The embedding with our weights."""
    return nn.Embedding.from_pretrained(torch.from_numpy(weights["embed"].copy()), freeze=False)


def decoder(shape: Shape, weights: Weights) -> nn.Linear:
    """The decoder with our weights."""
    linear = nn.Linear(shape.hidden, shape.vocab)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weights["head kernel"].T))
        linear.bias.copy_(torch.from_numpy(weights["head bias"]))
    return linear


def decoder_weights(linear: nn.Linear) -> Weights:
    """Its parameters in our layout."""
    return {"head kernel": to_numpy(linear.weight).T, "head bias": to_numpy(linear.bias)}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values."""
    return tensor.detach().numpy()


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class LanguageModel(nn.Module):
    """Embedding, LSTM layers and decoder, time-major."""

    def __init__(self, shape: Shape):
        super().__init__()
        weights = initial_weights(shape)
        self.embed = embedding(weights)
        self.lstm = lstm_layers(shape, weights, range(1, shape.layers + 1))
        self.decoder = decoder(shape, weights)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of tokens [T, B]."""
        hidden, _ = self.lstm(self.embed(inputs))
        return nn.functional.cross_entropy(self.decoder(hidden).flatten(0, 1), targets.flatten())


def make(shape: Shape, *, threads: int = 1, products: str = "float32") -> Peer:
    """Training in one process.

    Args:
      shape: model and batch.
      threads: of one operation.
      products: "bfloat16" lets the operands of matrix products be rounded.
    """
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("medium" if products == "bfloat16" else "highest")
    model = LanguageModel(shape)
    parameters = trained(model)
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, fused=True)
    inputs, targets = (torch.from_numpy(tokens.astype(np.int64)) for tokens in batch_of(shape))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        return loss.item()

    def params() -> Weights:
        layers = lstm_weights(model.lstm, range(1, shape.layers + 1))
        return {"embed": to_numpy(model.embed.weight), **layers, **decoder_weights(model.decoder)}

    return Peer(step, params)
