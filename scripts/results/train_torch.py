"""Trains the same recipe with PyTorch's nn.LSTM, on one device, for a curve to compare with.

    python scripts/results/train_torch.py configs/zaremba_small.toml [--section.field value] > torch.jsonl

All settings are read from the configuration of `mp-lstm train`, and so are the batches: the same rows in the same
order, short last batches included. The model is the same function of as many parameters: nn.LSTM has two biases, of
which the second is kept at zero where `model.biases` is 1. Weights are drawn from the same distributions, by PyTorch's
own generator; dropout's masks differ likewise. Where `model.products` is "bfloat16", PyTorch rounds products' operands
too (`set_float32_matmul_precision("medium")`).

It prints one JSON object a line, with the fields of metrics.jsonl: "valid" after each epoch, "test" with the parameters
of the best validation, as `mp-lstm train` has it. Recipes beyond this model (see `refuse`) end with a message.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mp_lstm.data import BatchSource, iterate
from mp_lstm.errors import InputError
from mp_lstm.layers.batch import Batch
from mp_lstm.training.build import make_sources, read_corpus
from mp_lstm.training.config import Config, load

State = tuple[Tensor, Tensor] | None


class LanguageModel(nn.Module):
    """Embedding, nn.LSTM with dropout before, between and after its layers, decoder."""

    def __init__(self, config: Config, vocab: int):
        super().__init__()
        model = config.model
        assert isinstance(model.hidden, int), "see `refuse`"
        assert isinstance(model.init_scale, float), "see `refuse`"
        self.drop = nn.Dropout(model.dropout)
        self.embed = nn.Embedding(vocab, model.embed)
        self.lstm = nn.LSTM(model.embed, model.hidden, model.layers, dropout=model.dropout)
        self.head = nn.Linear(model.hidden, vocab)
        if model.tie:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if name == "head.bias":
                nn.init.zeros_(parameter)
            elif "bias_hh" in name and model.biases == 1:
                nn.init.zeros_(parameter)
                parameter.requires_grad_(False)
            else:
                nn.init.uniform_(parameter, -model.init_scale, model.init_scale)
            if "bias_ih" in name:
                parameter.data[model.hidden : 2 * model.hidden] += model.forget_bias

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Logits [T, B, V] and the state after."""
        y, state = self.lstm(self.drop(self.embed(inputs)), state)
        return self.head(self.drop(y)), state


def summed_loss(model: LanguageModel, batch: Batch, state: State) -> tuple[Tensor, int, int, State]:
    """The summed loss of a batch's real tokens, their number, that of its rows that have any, and the state after."""
    inputs, targets = (torch.from_numpy(np.asarray(leaf, np.int64)) for leaf in (batch.inputs, batch.targets))
    lengths = np.asarray(batch.lengths)
    if np.all(batch.resets):
        state = None
    logits, state = model(inputs, state)
    targets = torch.where(torch.arange(len(targets))[:, None] < torch.from_numpy(lengths), targets, -100)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, int(lengths.sum()), int((lengths > 0).sum()), None if state is None else detached(state)


def detached(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The state's values, through which no gradient flows to the batch before."""
    return state[0].detach(), state[1].detach()


def mean_loss(model: LanguageModel, source: BatchSource) -> tuple[float, int]:
    """Loss a token, and the number of tokens, of a whole split without dropout."""
    model.eval()
    total, tokens, state = 0.0, 0, None
    with torch.no_grad():
        for _, batch in iterate(source, epochs=1):
            loss, count, _, state = summed_loss(model, batch, state)
            total, tokens = total + float(loss), tokens + count
    return total / tokens, tokens


def train_epoch(model: LanguageModel, config: Config, source: BatchSource, epoch: int, rate: float) -> float:
    """Trains for one epoch; returns the loss a token."""
    model.train()
    section = config.optimizer
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=rate)
    total, tokens, state = 0.0, 0, None
    for _, batch in iterate(source, start=(epoch, 0), epochs=epoch + 1):
        optimizer.zero_grad()
        loss, count, rows, state = summed_loss(model, batch, state)
        (loss / (count if section.normalize == "tokens" else rows)).backward()
        if section.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, section.max_norm)
        optimizer.step()
        total, tokens = total + float(loss.detach()), tokens + count
    return total / tokens


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Trains and tests; yields the events."""
    torch.manual_seed(config.train.seed)
    torch.set_float32_matmul_precision("medium" if config.model.products == "bfloat16" else "highest")
    corpus = read_corpus(config)
    sources = make_sources(config, corpus)
    model = LanguageModel(config, len(corpus.vocabulary))
    section, began = config.optimizer, time.perf_counter()
    yield {"event": "start", "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad)}
    rate, best, kept = section.learning_rate, math.inf, {}
    for epoch in range(config.train.epochs):
        if section.rate_schedule == "epochs":
            rate = section.learning_rate / section.rate_divisor ** max(epoch + 1 - section.rate_epochs, 0)
        trained = train_epoch(model, config, sources.train, epoch, rate)
        loss, tokens = mean_loss(model, sources.valid)
        yield {
            **found("valid", loss, tokens, epoch + 1),
            "train_perplexity": math.exp(trained),
            "learning_rate": rate,
            "seconds": time.perf_counter() - began,
        }
        # `mp-lstm train` has one threshold for the rate and none for the best parameters.
        if section.rate_schedule == "plateau" and loss >= best * (1 - section.plateau_threshold):
            rate *= section.rate_factor
        if loss < best:
            best, kept = loss, {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(kept)
    yield found("test", *mean_loss(model, sources.test), config.train.epochs)


def found(event: str, loss: float, tokens: int, epoch: int) -> dict[str, Any]:
    """An event of metrics.jsonl."""
    return {"event": event, "epoch": epoch, "loss": loss, "perplexity": math.exp(loss), "tokens": tokens}


KNOWN = {
    "data": ("source", "mode", "buckets", "batch_size", "length", "vocab_limit"),
    "model": (
        *("embed", "hidden", "layers", "dropout", "tie", "residual"),
        *("init_scale", "forget_bias", "biases", "products"),
    ),
    "optimizer": (
        *("name", "learning_rate", "max_norm", "normalize"),
        *("rate_schedule", "rate_factor", "plateau_threshold", "rate_epochs", "rate_divisor"),
    ),
}


def refuse(config: Config) -> None:
    """Raises InputError for a configuration of which this script would train something else."""
    model, optimizer = config.model, config.optimizer
    needed = (
        ("data.mode", config.data.mode, ("contiguous",)),
        ("model.residual", model.residual, (None,)),
        ("model.hidden", type(model.hidden).__name__, ("int",)),
        ("model.init_scale", type(model.init_scale).__name__, ("float",)),
        ("optimizer.name", optimizer.name, ("sgd",)),
        ("optimizer.rate_schedule", optimizer.rate_schedule, ("constant", "epochs", "plateau")),
    )
    for name, value, wanted in needed:
        if value not in wanted:
            raise InputError(
                f"{name} is {value!r}, this script knows {', '.join(map(str, wanted))}: use another recipe"
            )
    for section, names in KNOWN.items():
        for name, value in vars(getattr(config, section)).items():
            if name not in names and value != getattr(getattr(Config(), section), name):
                raise InputError(f"{section}.{name} is {value!r}, which this script does not know: use another recipe")


def main() -> int:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a configuration of mp-lstm train")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    try:
        config = load(args.config, overrides)
        refuse(config)
        for event in run(config):
            print(json.dumps(event), flush=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
