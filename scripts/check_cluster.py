#!/usr/bin/env python
"""Checks the devices there are, of one process or of several: do they compute the same, how fast do they talk?

    python scripts/check_cluster.py                            this process's devices
    python scripts/check_cluster.py --processes 2              two processes on this machine
    srun python scripts/check_cluster.py --processes auto      those that SLURM (Open MPI, Kubernetes) starts
    python scripts/check_cluster.py --coordinator HOST:PORT --processes N --process I        by hand

    transparency   every number of stages finds the loss and gradient of one device
    transfers      what a small and a large array take from a stage to the next
    training       a few steps: the loss falls
    rates          of products, memory and programs on the first stage's device

It ends with a verdict, exit status 0 or 1, and writes the rates as the calibration that `mp-lstm plan --pipeline.costs
FILE.toml` reads. On CPUs that share cores, rates are of a device that works alone.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mp_lstm
from mp_lstm import launch, launcher
from mp_lstm.errors import InputError
from mp_lstm.planning import Calibration
from mp_lstm.runtime.edges import stage_devices
from mp_lstm.runtime.placement import Tree, everywhere, put, stage_sharding, transfer
from mp_lstm.runtime.processes import is_first

VOCAB, ROWS, LENGTH = 50, 8, 16
SMALL, LARGE = 1024, 4 << 20  # bytes
MOST_STAGES = 5  # rows of the small model


class Link(NamedTuple):
    """Seconds that a small and a large array take from one stage to the next."""

    small: float
    large: float

    @property
    def bytes_per_second(self) -> float:
        """Of what a large array takes beyond a small one."""
        return (LARGE - SMALL) / max(self.large - self.small, 1e-9)


def make_pipe(devices: Sequence[Any], stages: int) -> mp_lstm.Pipeline:
    """A small model, with dropout and tied weights, on some stages."""
    model = mp_lstm.language_model(vocab=VOCAB, embed=16, hidden=16, layers=3, dropout=0.3, tie=True)
    options = {"schedule": "wavefront", "chunk": LENGTH // 2, "microbatches": 1}
    plan = mp_lstm.make_plan(model, batch_size=ROWS, lengths=(LENGTH,), devices=devices, stages=stages, **options)
    return mp_lstm.make_pipeline(model, plan, optax.adam(1e-2), max_norm=1.0)


def batch() -> mp_lstm.Batch:
    """Words that each follow from the one before."""
    words = (np.arange(ROWS)[None, :] * 7 + np.arange(LENGTH + 1)[:, None] * 3) % VOCAB
    return mp_lstm.Batch(words[:-1], words[1:])


def is_transparent(devices: Sequence[Any], stages: int) -> bool:
    """Whether loss and gradient over some stages are those of one device."""
    pipe = make_pipe(devices, stages)
    return bool(pipe.verify(pipe.init(jax.random.key(0)), batch()).passed)


def does_learn(devices: Sequence[Any], steps: int) -> tuple[float, float]:
    """Losses of the first and the last of some steps, over all devices."""
    pipe = make_pipe(devices, min(len(devices), MOST_STAGES))
    state, losses = pipe.init(jax.random.key(0)), []
    for _ in range(steps):
        state, metrics = pipe.step(state, batch())
        losses.append(float(metrics.loss))
    return losses[0], losses[-1]


def seconds_of(repeat: Callable[[], None], times: int) -> float:
    """Seconds of one call, the first of which does not count."""
    repeat()
    began = time.perf_counter()
    for _ in range(times):
        repeat()
    return (time.perf_counter() - began) / times


def measure_link(source: Any, target: Any, times: int) -> Link:
    """Times arrays that go from one device to another and back."""
    there, back = stage_sharding(target), stage_sharding(source)

    def seconds(size: int) -> float:
        sent: Tree = put(np.zeros(size // 4, np.float32), back)

        def rounds() -> None:
            held = sent
            for _ in range(times):
                held = transfer(transfer(held, there), back)
            wait(held)

        return seconds_of(rounds, 3) / (2 * times)

    return Link(seconds(SMALL), seconds(LARGE))


def wait(tree: Tree) -> None:
    """Waits for arrays of any process."""
    jax.block_until_ready(everywhere(tree))


class Rates(NamedTuple):
    """What a device can do: operations and bytes a second, and seconds of an empty program."""

    flops: float
    bytes: float
    kernel: float


def measure_rates(device: Any, size: int) -> Rates:
    """Times a product, a pass over memory and an empty program on a device of this process."""
    matrix = jax.device_put(np.ones((size, size), np.float32), device)
    values = jax.device_put(np.ones(size * size * 4, np.float32), device)
    one = jax.device_put(np.float32(1), device)

    def timed(function: Callable[[Any], Any], x: Any) -> float:
        program = jax.jit(function)
        return seconds_of(lambda: jax.block_until_ready(program(x)), 5)

    return Rates(
        flops=2 * size**3 / timed(lambda x: x @ x, matrix),
        bytes=2 * values.nbytes / timed(lambda x: x + 1, values),
        kernel=timed(jnp.negative, one),
    )


def calibration_text(devices: Sequence[Any], rates: Rates, link: Link) -> str:
    """The calibration as TOML."""
    kind = re.sub(r"\W+", "_", devices[0].device_kind.lower()).strip("_")
    return f"""devices = {{ {kind} = {len(devices)} }}

[device.{kind}]
flops_per_second = {rates.flops:.3g}
bytes_per_second = {rates.bytes:.3g}
kernel_seconds = {rates.kernel:.3g}

[link]
bytes_per_second = {link.bytes_per_second:.3g}
latency_seconds = {link.small:.3g}
"""


def check(out: Path, *, quick: bool) -> bool:
    """Checks all devices; says what it finds, and whether it is well."""
    devices = stage_devices()
    print(f"{len(devices)} devices of {jax.process_count()} processes: {', '.join(map(str, devices))}", flush=True)
    well = True
    for stages in range(1, min(len(devices), MOST_STAGES) + 1):
        passed = is_transparent(devices, stages)
        well &= passed
        print(f"transparency, {stages} stages: {'passed' if passed else 'FAILED'}", flush=True)
    links = [Link(0.0, 0.0)]
    for source, target in itertools.pairwise(devices):
        link = measure_link(source, target, times=3 if quick else 30)
        links.append(link)
        speed = f"{link.small * 1e6:.0f} us, {link.bytes_per_second / 1e9:.2f} GB/s"
        print(f"transfers, {source} to {target}: {speed}", flush=True)
    first, last = does_learn(devices, 5 if quick else 30)
    well &= last < first
    print(f"training: loss {first:.3f} to {last:.3f}: {'passed' if last < first else 'FAILED'}", flush=True)
    rates = measure_rates(jax.local_devices()[0], 256 if quick else 2048)
    print(
        f"rates: {rates.flops / 1e9:.0f} GFLOP/s, {rates.bytes / 1e9:.1f} GB/s, {rates.kernel * 1e6:.0f} us a program"
    )
    if is_first():
        out.write_text(calibration_text(devices, rates, max(links, key=lambda link: link.large)))
        Calibration.load(out)
    print(f"calibration: {out}\nverdict: {'all is well' if well else 'NOT well: see FAILED above'}", flush=True)
    return well


def main(words: Sequence[str] | None = None) -> int:
    """Runs the check, in this process or in several."""
    parser = argparse.ArgumentParser(description="Checks the devices there are.")
    parser.add_argument("--processes", metavar="N", help="of this machine; with --process, of all; auto: as detected")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 can be reached")
    parser.add_argument("--process", type=int, metavar="I", help="the number of this one")
    parser.add_argument("--emulate-devices", type=int, metavar="K", help="CPU devices of all processes")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds to wait for others")
    parser.add_argument("--out", type=Path, default=Path("calibration.toml"), help="default: calibration.toml")
    parser.add_argument("--quick", action="store_true", help="few repetitions: times mean little")
    args = parser.parse_args(words)
    given = list(sys.argv[1:] if words is None else words)
    try:
        if (args.processes or "").isdecimal() and args.coordinator is args.process is None:
            at = given.index("--processes")
            inner = [sys.executable, __file__, *given[:at], *given[at + 2 :]]
            return launcher.launch(inner, int(args.processes))
        launch.prepare(
            args.emulate_devices, launch.member(args.coordinator, args.processes, args.process), args.timeout
        )
        return 0 if check(args.out, quick=args.quick) else 1
    except InputError as error:
        print(f"check_cluster: {error}", file=sys.stderr)
        return launch.leave(2)
    except Exception as error:  # of any kind: peers would wait; raised again where there are none
        launch.fail(error)


if __name__ == "__main__":
    sys.exit(main())
