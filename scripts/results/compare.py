"""Writes docs/benchmarks/results.md: curves of runs side by side, epoch by epoch, and their plots.

    python scripts/results/compare.py "zaremba_small on austen:RUN_DIR:torch.jsonl"
    python scripts/results/compare.py "eight layers on austen:gnmt_8=RUN_DIR:mxnet_8x400=RUN_DIR"

Each argument is a title and two curves: the directory of a run of `mp-lstm train`, or what train_torch.py printed. They
are named mp_lstm and PyTorch, unless NAME= comes before the path. Curves are kept in results.json beside the page, and
those of the given titles replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mp_lstm.errors import InputError
from mp_lstm.training.files import replace_text
from mp_lstm.training.metrics import read_metrics

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "results.md"
NAMES = ("mp_lstm", "PyTorch")
HEAD = """# What is trained

Validation perplexity after each epoch, and test perplexity with the parameters of the best validation. Ours were
trained by `mp-lstm train` on two emulated devices; PyTorch's nn.LSTM of the same recipe (the same configuration file,
batches and order) on one, by `scripts/results/train_torch.py`. Written by `scripts/results/compare.py`.

A curve is of one seed. Other seeds of zaremba_small, of which the one here is the best, differ from it by as much as
the curves do: see [NOTES.md](NOTES.md).
"""


class Curve(NamedTuple):
    """Validation perplexity by epoch, and test perplexity."""

    valid: dict[int, float]
    test: float | None


Pair = dict[str, Curve]


def read_curve(path: Path) -> Curve:
    """Reads a run's metrics.jsonl, or the lines of train_torch.py; of an epoch the last validation counts."""
    events = read_metrics(path / "metrics.jsonl" if path.is_dir() else path)
    valid = {event["epoch"]: event["perplexity"] for event in events if event["event"] == "valid"}
    if not valid:
        raise InputError(f"{path} has no validation: pass a run directory, or the lines that train_torch.py printed")
    test = [event["perplexity"] for event in events if event["event"] == "test"]
    return Curve(valid, test[-1] if test else None)


def read_pair(word: str) -> tuple[str, Pair]:
    """The title and the curves of an argument."""
    title, *parts = word.split(":")
    if len(parts) != 2:
        raise InputError(f"got {word!r}, wanted TITLE:RUN_DIR:TORCH, e.g. austen:runs/austen:torch.jsonl")
    curves = {}
    for part, usual in zip(parts, NAMES, strict=True):
        name, given, path = part.rpartition("=")
        curves[name if given else usual] = read_curve(Path(path))
    if len(curves) < 2:
        raise InputError(f"got {word!r}, whose curves have one name: write TITLE:NAME=PATH:NAME=PATH")
    return title, curves


def read_stored(path: Path) -> dict[str, Pair]:
    """Curves of earlier runs, by title; none where there is no file.

    Raises:
      InputError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        return {
            title: {
                name: Curve({int(epoch): float(value) for epoch, value in curve["valid"].items()}, curve["test"])
                for name, curve in pair.items()
            }
            for title, pair in json.loads(path.read_text(encoding="utf-8")).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} does not hold curves ({error!r}): move it away") from error


def table(pair: Pair) -> str:
    """Both curves as a table of Markdown, with how much the first is above the second."""
    ours, theirs = pair.values()
    rows = [(str(epoch), ours.valid.get(epoch), theirs.valid.get(epoch)) for epoch in sorted(ours.valid | theirs.valid)]
    lines = [f"| epoch | {' | '.join(pair)} | difference |", "|---|---|---|---|"]
    for name, a, b in [*rows, ("test", ours.test, theirs.test)]:
        difference = "" if a is None or b is None else f"{100 * (a / b - 1):+.1f}%"
        lines.append(f"| {name} | {_shown(a)} | {_shown(b)} | {difference} |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(title: str, pair: Mapping[str, Curve]) -> Any:
    """A figure of validation perplexity by epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for (name, curve), style in zip(pair.items(), ("o-", "s--"), strict=True):
        axes.plot(list(curve.valid), list(curve.valid.values()), style, label=name)
    axes.set(title=title, xlabel="epoch", ylabel="validation perplexity", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.legend()
    return figure


def write(page: Path, found: Mapping[str, Pair]) -> None:
    """Writes the page, its pictures, and the curves."""
    parts = [HEAD]
    for title, pair in found.items():
        picture = page.with_name(f"{page.stem}-{re.sub(r'[^a-z0-9]+', '-', title.lower())}.png")
        draw(title, pair).savefig(picture)
        parts.append(f"## {title}\n\n{table(pair)}\n\n![{title}]({picture.name})\n")
    plain = {title: {name: curve._asdict() for name, curve in pair.items()} for title, pair in found.items()}
    replace_text(page.with_suffix(".json"), json.dumps(plain, indent=1) + "\n")
    replace_text(page, "\n".join(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, writes the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="*", metavar="TITLE:RUN_DIR:TORCH", help="what to compare; none: write anew")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the page (default: docs/benchmarks/results.md)")
    args = parser.parse_args(argv)
    try:
        if not args.out.parent.is_dir():
            raise InputError(f"--out: {args.out.parent} is no directory: make it, or pass another file")
        write(args.out, read_stored(args.out.with_suffix(".json")) | dict(map(read_pair, args.curves)))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
