"""Writes docs/benchmarks/results.md: our curves beside PyTorch's for the same recipes, epoch by epoch, and their plots.

    python scripts/results/compare.py austen:RUN_DIR:torch.jsonl wikitext-2:RUN_DIR:torch.jsonl

Each argument is a title, the directory of a run of `mp-lstm train`, and what train_torch.py printed for the same
configuration. A second file of PyTorch's instead of the run is read just the same.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mp_lstm.errors import InputError
from mp_lstm.training.files import replace_text
from mp_lstm.training.metrics import read_metrics

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "results.md"
HEAD = """# What is trained, beside PyTorch

Validation perplexity after each epoch, and test perplexity with the parameters of the best validation, of the same
recipe (the same configuration file, batches and order) trained by `mp-lstm train` on two emulated devices and by
PyTorch's nn.LSTM on one (`scripts/results/train_torch.py`). Written by `scripts/results/compare.py`.
"""


class Curve(NamedTuple):
    """Validation perplexity by epoch, and test perplexity."""

    valid: dict[int, float]
    test: float | None


def read_curve(path: Path) -> Curve:
    """Reads a run's metrics.jsonl, or the lines of train_torch.py; of an epoch the last validation counts."""
    events = read_metrics(path / "metrics.jsonl" if path.is_dir() else path)
    valid = {event["epoch"]: event["perplexity"] for event in events if event["event"] == "valid"}
    if not valid:
        raise InputError(f"{path} has no validation: pass a run directory, or the lines that train_torch.py printed")
    test = [event["perplexity"] for event in events if event["event"] == "test"]
    return Curve(valid, test[-1] if test else None)


def table(ours: Curve, theirs: Curve) -> str:
    """Both curves as a table of Markdown, with how much ours is above."""
    rows = [(str(epoch), ours.valid.get(epoch), theirs.valid.get(epoch)) for epoch in sorted(ours.valid | theirs.valid)]
    lines = ["| epoch | mp_lstm | PyTorch | difference |", "|---|---|---|---|"]
    for name, a, b in [*rows, ("test", ours.test, theirs.test)]:
        difference = "" if a is None or b is None else f"{100 * (a / b - 1):+.1f}%"
        lines.append(f"| {name} | {_shown(a)} | {_shown(b)} | {difference} |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def plot(title: str, curves: dict[str, Curve], path: Path) -> None:
    """Draws validation perplexity by epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for (name, curve), style in zip(curves.items(), ("o-", "s--"), strict=True):
        axes.plot(list(curve.valid), list(curve.valid.values()), style, label=name)
    axes.set(title=title, xlabel="epoch", ylabel="validation perplexity", yscale="log")
    axes.legend()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, writes the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="+", metavar="TITLE:RUN_DIR:TORCH", help="what to compare")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the page (default: docs/benchmarks/results.md)")
    args = parser.parse_args(argv)
    parts = [HEAD]
    try:
        if not args.out.parent.is_dir():
            raise InputError(f"--out: {args.out.parent} is no directory: make it, or pass another file")
        for word in args.curves:
            if word.count(":") != 2:
                raise InputError(f"got {word!r}, wanted TITLE:RUN_DIR:TORCH, e.g. austen:runs/austen:torch.jsonl")
            title, *paths = word.split(":")
            ours, theirs = (read_curve(Path(path)) for path in paths)
            picture = args.out.with_name(f"results-{re.sub(r'[^a-z0-9]+', '-', title.lower())}.png")
            plot(title, {"mp_lstm": ours, "PyTorch": theirs}, picture)
            parts.append(f"## {title}\n\n{table(ours, theirs)}\n\n![{title}]({picture.name})\n")
        replace_text(args.out, "\n".join(parts))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
