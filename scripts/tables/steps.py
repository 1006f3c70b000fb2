"""Step time against the time steps, rows, hidden units and layers of a model, each doubled twice both ways."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import optax

import mp_lstm
from tables.kit import Runner, Series, draw, full_batch, in_turn, lines, markdown, prose, together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FACTORS = (0.25, 0.5, 1, 2, 4)


class Size(NamedTuple):
    """A model and its batch; embeddings are as wide as the layers."""

    time: int = 32
    rows: int = 20
    hidden: int = 256
    layers: int = 4


class Timed(NamedTuple):
    """Seconds of a size's rounds, its work in operations, and the seconds that nominal rates give it."""

    seconds: list[float]
    work: float
    nominal: float

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


WORDS = {"time": "time steps T", "rows": "rows B", "hidden": "hidden units H", "layers": "layers L"}


def sizes_along(base: Size, axis: str) -> list[Size]:
    """Sizes that differ from the base along one axis."""
    return [base._replace(**{axis: int(getattr(base, axis) * factor)}) for factor in FACTORS]


def per_work(timed: Timed, base: Timed) -> float:
    """Seconds per unit of work, relative to the base's."""
    return (timed.median / timed.work) / (base.median / base.work)


def nominal_per_work(timed: Timed, base: Timed) -> float:
    """The same by nominal rates."""
    return (timed.nominal / timed.work) / (base.nominal / base.work)


def measure(sizes: list[Size], vocab: int, rounds: int) -> dict[Size, Timed]:
    """Times a step of every size on one device, all of them in turn."""
    runs, work, nominal = [], [], []
    for size in sizes:
        model = mp_lstm.language_model(vocab=vocab, embed=size.hidden, hidden=size.hidden, layers=size.layers)
        plan = mp_lstm.make_plan(model, batch_size=size.rows, lengths=(size.time,), devices=jax.devices()[:1])
        pipe = mp_lstm.make_pipeline(model, plan, optax.sgd(0.1), max_norm=5.0)
        window = pipe.place(full_batch(model, size.time, size.rows))
        runner = Runner(pipe, [window])
        runs.append(lambda runner=runner, window=window: runner.seconds([window]))
        work.append(sum(row.cost(size.rows, size.time).flops for row in model.rows))
        costs = mp_lstm.default_calibration().costs(model)
        nominal.append(mp_lstm.predict(plan, model, costs, size.time).makespan)
    seconds = in_turn(runs, rounds)
    return dict(zip(sizes, map(Timed, seconds, work, nominal), strict=True))


def table(picture: Path, *, quick: bool) -> str:
    """Measures, draws, and says what it shows."""
    base, vocab, rounds = (Size(8, 4, 8, 4), 50, 2) if quick else (Size(), 2_000, 15)
    along = {axis: sizes_along(base, axis) for axis in Size._fields}
    timed = measure(list(dict.fromkeys(size for sizes in along.values() for size in sizes)), vocab, rounds)
    rows, worse = [], []
    for axis, sizes in along.items():
        for size in sizes:
            found, relative = timed[size], per_work(timed[size], timed[base])
            times = f"{min(found.seconds) * 1e3:.1f} | {found.median * 1e3:.1f}"
            shares = f"{relative:.2f} | {nominal_per_work(found, timed[base]):.2f}"
            rows.append([f"{axis} {getattr(size, axis)}", f"{found.work / 1e9:.2f}", times, shares])
            if relative > 1.05 and getattr(size, axis) > getattr(base, axis):
                worse.append(f"{axis} {getattr(size, axis)} ({relative:.2f})")

    def panel(axes: Axes) -> None:
        series = [
            Series(WORDS[axis], FACTORS, [per_work(timed[size], timed[base]) for size in sizes])
            for axis, sizes in along.items()
        ]
        lines(axes, series, "size, relative to the base", "seconds per operation, relative to the base")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)

    head = ["size", "GFLOP", "best, ms", "median, ms", "per operation, to the base", "by nominal rates"]
    return together(
        prose(
            f"A step (F, B, W, clipping, SGD) on one device, {rounds} rounds over all sizes in turn. The base has",
            f"T {base.time}, B {base.rows}, H {base.hidden}, L {base.layers} and a vocabulary of {vocab:,}; a line",
            "differs from it in one size. The last columns are seconds per floating-point operation, relative to the",
            "base: 1.00 is linear, less is better than linear. Nominal rates know operations, the bytes read and",
            "written, and a constant for each task; what they say of a size is explained by these.",
        ),
        markdown(head, rows),
        f"Larger than the base and worse than linear by more than 5%: {', '.join(worse) or 'none'}.",
        draw(picture, [panel]),
    )
