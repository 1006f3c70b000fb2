"""PyTorch's torch.distributed.pipelining over two processes of one thread each.

Stage 0 has the embedding and the first LSTM layers, stage 1 the others, the decoder and the loss. Micro-batches are
slices of the rows, so tensors between the user and the schedule are row-major. One object of this kind lives in each
of the two processes; they meet through a file.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from peers.problem import LEARNING_RATE, MAX_NORM, Peer, Shape, Weights, batch_of, initial_weights
from peers.torch_single import decoder, decoder_weights, embedding, lstm_layers, lstm_weights, to_numpy, trained

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class First(nn.Module):
    """Embedding and the first LSTM layers."""

    def __init__(self, shape: Shape, split: int):
        super().__init__()
        weights, self.numbers = initial_weights(shape), range(1, split + 1)
        self.embed = embedding(weights)
        self.lstm = lstm_layers(shape, weights, self.numbers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] to hidden states [T, B, H]."""
        return self.lstm(self.embed(inputs.t()))[0]

    def weights(self) -> Weights:
        """Parameters in our layout."""
        return {"embed": to_numpy(self.embed.weight), **lstm_weights(self.lstm, self.numbers)}


class Last(nn.Module):
    """The remaining LSTM layers, if there are any, and the decoder."""

    def __init__(self, shape: Shape, split: int):
        super().__init__()
        weights, self.numbers = initial_weights(shape), range(split + 1, shape.layers + 1)
        self.lstm = lstm_layers(shape, weights, self.numbers) if self.numbers else None
        self.decoder = decoder(shape, weights)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, B, H] to logits [T, B, V]."""
        return self.decoder(hidden if self.lstm is None else self.lstm(hidden)[0])

    def weights(self) -> Weights:
        """Parameters in our layout."""
        layers = {} if self.lstm is None else lstm_weights(self.lstm, self.numbers)
        return {**layers, **decoder_weights(self.decoder)}


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss of logits [T, B, V] and targets [B, T]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.t().reshape(-1))


def clip(parameters: list[nn.Parameter]) -> None:
    """What clip_grad_norm_ does, for a norm over both processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = nn.utils.get_total_norm(gradients).square().reshape(1)
    dist.all_reduce(square)
    scale = min(1.0, MAX_NORM / (float(square.sqrt()) + 1e-6))
    for gradient in gradients:
        gradient.mul_(scale)


def make(shape: Shape, *, rank: int, meet: str, schedule: str, split: int, microbatches: int) -> Peer:
    """One of the two processes.

    Args:
      shape: model and batch.
      rank: 0 or 1.
      meet: a file that does not exist yet, through which the two find each other.
      schedule: "GPipe" or "1F1B".
      split: LSTM layers of stage 0, at least 1.
      microbatches: slices of the batch; they must divide it.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    module = First(shape, split) if rank == 0 else Last(shape, split)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, microbatches, loss_fn=loss_of)
    parameters = trained(module)
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, fused=True)
    inputs, targets = (torch.from_numpy(tokens.T.astype(np.int64)) for tokens in batch_of(shape))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        if rank == 0:
            pipeline.step(inputs, return_outputs=False)
        else:
            pipeline.step(target=targets, losses=losses, return_outputs=False)
        clip(parameters)
        optimizer.step()
        return torch.stack(losses).mean().item() if rank == 1 else 0.0

    about = f"{schedule}, {split}+{shape.layers - split} layers, {microbatches} micro-batches"
    return Peer(step, module.weights, about)
