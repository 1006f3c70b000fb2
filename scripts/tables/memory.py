"""Peak memory of each device against the number of stages: parameters and activations divide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import optax

import mp_lstm
from mp_lstm.runtime.memory import live_bytes, nbytes
from tables.kit import Series, draw, full_batch, lines, markdown, prose, together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CACHE = Path(".cache/memory")  # sizes alone count here; not where measured plans look for times
STAGES = (1, 2, 4)
TIME, ROWS, CHUNKS = 32, 20, 4
SIZES: dict[str, Any] = {"vocab": 2_000, "embed": 256, "hidden": 256, "layers": 6}  # eight rows of about equal size
TINY: dict[str, Any] = {"vocab": 40, "embed": 8, "hidden": 8, "layers": 6}


class Held(NamedTuple):
    """Bytes on one device: its parameters, the peak during a step, and what was predicted of it."""

    stages: int
    device: int
    parameters: int
    peak: int
    predicted: int

    @property
    def rest(self) -> int:
        """Beside parameters and their gradients: activations and temporaries."""
        return self.peak - 2 * self.parameters


def measure(model: mp_lstm.Model) -> list[Held]:
    """Runs a step on 1, 2 and 4 devices, with the rows divided evenly."""
    optimizer, found = optax.sgd(0.1), []
    costs = mp_lstm.measure_costs(
        model, ROWS, (TIME,), jax.devices()[:1], microbatches=(1,), optimizer=optimizer, cache_dir=CACHE, repeats=1
    )
    for stages in STAGES:
        plan = mp_lstm.make_plan(
            model,
            batch_size=ROWS,
            lengths=(TIME,),
            devices=jax.devices()[:stages],
            partition=(len(model.rows) // stages,) * stages,
            schedule="wavefront",
            chunk=TIME // CHUNKS,
            microbatches=1,
        )
        pipe = mp_lstm.make_pipeline(model, plan, optimizer, max_norm=5.0)
        state = pipe.init(jax.random.key(0))
        parameters = [nbytes(held.own) for held in state.stages]
        predicted = mp_lstm.predicted_memory(plan, model, costs)
        _, peaks = live_bytes(pipe, state, full_batch(model, TIME, ROWS))
        found += [Held(stages, i, parameters[i], peaks[i], predicted[i]) for i in range(stages)]
    return found


def worst(found: list[Held], stages: int, what: str) -> int:
    """The most bytes on a device."""
    return max(getattr(held, what) for held in found if held.stages == stages)


HEAD = ("stages", "device", "parameters, MB", "activations and temporaries, MB", "peak, MB", "predicted, MB", "error")


def row(held: Held) -> list[str]:
    """A device's line under the heads."""
    sizes = (held.parameters, held.rest, held.peak, held.predicted)
    megabytes = [f"{size / 1e6:.2f}" for size in sizes]
    return [f"{held.stages}", f"{held.device}", *megabytes, f"{held.predicted / held.peak - 1:+.0%}"]


def table(picture: Path, *, quick: bool) -> str:
    """Measures, draws, and says what it shows."""
    sizes = TINY if quick else SIZES
    found = measure(mp_lstm.language_model(**sizes))
    rows = [row(held) for held in found]
    shares = [
        [
            stages,
            *(f"{worst(found, stages, what) / worst(found, 1, what):.2f}" for what in ("parameters", "rest", "peak")),
        ]
        for stages in STAGES
    ]

    def panel(axes: Axes) -> None:
        series = [
            Series(name, STAGES, [worst(found, stages, what) / worst(found, 1, what) for stages in STAGES])
            for what, name in (("parameters", "parameters"), ("rest", "activations and temporaries"), ("peak", "peak"))
        ]
        series.append(Series("one over stages", STAGES, [1 / stages for stages in STAGES]))
        lines(axes, series, "stages", "of the fullest device, relative to one stage")
        axes.set_ylim(bottom=0)

    return together(
        prose(
            f"A step of plain SGD with T {TIME}, B {ROWS}, vocabulary {sizes['vocab']:,}, {sizes['layers']} layers of",
            f"{sizes['hidden']}: eight rows of about equal size, divided evenly, `wavefront` of {CHUNKS} chunks. Peaks",
            "are what JAX holds (arrays and temporaries), predictions come from rows measured alone. Activations and",
            "temporaries are what the peak leaves beside parameters and their gradients.",
        ),
        markdown(HEAD, rows),
        "The fullest device, relative to one stage:",
        markdown(["stages", "parameters", "activations and temporaries", "peak"], shares),
        draw(picture, [panel]),
    )
