"""Training steps of ours and of other libraries, timed in turn: A B C A B C ...

    parent ---- {"do": "step"} ----> worker A        one process a contender (PyTorch's pipelining: two), pinned to
           <--- {"seconds": ...} --- worker A        its core or cores; all but one of them wait at any time
           ---- {"do": "step"} ----> worker B ...

All start from the same weights and tokens. After five steps their parameters must agree, and the very programs that
took these steps are then timed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from machine import busy_seconds, warn_of_others
from peers.problem import Shape, Weights, describe, disagreement, initial_weights, inputs_of, operations
from ratios import (
    ALL_ROUNDED,
    FLAX,
    FLAX_ALLOCATOR,
    OURS,
    OURS_BOTH,
    OURS_ROUNDED,
    OURS_TWO,
    OURS_TWO_ROUNDED,
    PRODUCTS,
    TORCH,
    TORCH_PIPELINE,
    TORCH_ROUNDED,
    TORCH_TWO,
    TORCH_TWO_ROUNDED,
)

PEERS = {"torch": (TORCH, TORCH_TWO, TORCH_PIPELINE), "flax": (FLAX, FLAX_ALLOCATOR)}
STEPS = 5
TOLERANCE = 1e-3
CHANGE_TOLERANCE = 1e-2
"""Of the whole change since the start: float32 resolves a change only so far."""
ROUNDED_TOLERANCE = 5e-3
ROUNDED_CHANGE_TOLERANCE = 5e-2
"""The same of products of bfloat16, which keeps 8 bits: four layers over 64 steps add up to 1.4e-2 of the change."""
# glibc's malloc keeps what a step frees: PyTorch is 15% slower without.
KEEP_MEMORY = (("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", "100000000000"))


class Contender(NamedTuple):
    """A contender: its module in peers/, the options of each of its processes, and how many cores each may use."""

    name: str
    module: str
    options: tuple[dict[str, Any], ...] = ({},)
    cores: int = 1
    environment: tuple[tuple[str, str], ...] = ()


class Worker(NamedTuple):
    """A process that waits for requests."""

    name: str
    process: subprocess.Popen[str]

    def ask(self, **request: Any) -> None:
        """Sends a request; `reply` waits for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        """The answer to the last request.

        Raises:
          RuntimeError: the process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}; what it printed is above")
        return json.loads(line)


class Team(NamedTuple):
    """A contender's processes."""

    name: str
    about: str
    workers: tuple[Worker, ...]

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Sends a request to all processes, and waits for all."""
        for worker in self.workers:
            worker.ask(**request)
        return [worker.reply() for worker in self.workers]

    def step(self) -> dict[str, float]:
        """One step: seconds of the slowest process, processor seconds and bytes of all."""
        replies = self.ask(do="step")
        return {
            "seconds": max(reply["seconds"] for reply in replies),
            "cpu": sum(reply["cpu"] for reply in replies),
            "peak": sum(reply["peak"] for reply in replies),
            "result": replies[-1]["result"],
        }


def contenders(installed: Sequence[str], plan: Mapping[str, Any], unroll: int = 1) -> list[Contender]:
    """All that take part, without PyTorch's pipelining, whose cutting is searched for first."""
    mine, two = {"unroll": unroll}, {"unroll": unroll, "devices": 2, "plan": dict(plan)}
    rounded = {"products": "bfloat16"}
    found = [
        Contender(OURS, "ours", (mine,)),
        Contender(OURS_BOTH, "ours", (mine,), cores=2),
        Contender(OURS_TWO, "ours", (two,), cores=2),
        Contender(OURS_ROUNDED, "ours", (mine | rounded,)),
        Contender(OURS_TWO_ROUNDED, "ours", (two | rounded,), cores=2),
    ]
    if "torch" in installed:
        for name, threads, options in (
            (TORCH, 1, {}),
            (TORCH_TWO, 2, {}),
            (TORCH_ROUNDED, 1, rounded),
            (TORCH_TWO_ROUNDED, 2, rounded),
        ):
            environment = (*KEEP_MEMORY, ("OMP_NUM_THREADS", str(threads)))
            found.append(Contender(name, "torch_single", ({"threads": threads} | options,), threads, environment))
    if "flax" in installed:
        found.append(Contender(FLAX, "flax_rnn"))
        found.append(Contender(FLAX_ALLOCATOR, "flax_rnn", ({"allocator": True},)))
    return found


@contextlib.contextmanager
def started(contender: Contender, shape: Shape) -> Iterator[Team]:
    """The contender's processes, ready to step; they end with the context."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment = inherited | {"PYTHONPATH": str(Path(__file__).parent)} | dict(contender.environment)
    workers = []
    with contextlib.ExitStack() as stack:
        for options in contender.options:
            job = {"module": contender.module, "shape": shape._asdict(), "options": options}
            command = [sys.executable, "-m", "peers.worker", json.dumps(job | {"cores": cores[-contender.cores :]})]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
            stack.callback(process.kill)
            workers.append(Worker(contender.name, process))
        about = [worker.reply()["about"] for worker in workers]
        yield Team(contender.name, about[-1], tuple(workers))


class Cut(NamedTuple):
    """One way to cut PyTorch's pipelining: LSTM layers of the first stage, and slices of the batch."""

    schedule: str
    split: int
    microbatches: int


def pipelining(cut: Cut, folder: str) -> Contender:
    """PyTorch's pipelining, cut in one way; its processes meet through a file in the folder."""
    options = cut._asdict() | {"meet": str(Path(folder, "-".join(map(str, (*cut, time.monotonic_ns())))))}
    environment = (*KEEP_MEMORY, ("OMP_NUM_THREADS", "1"))
    return Contender(TORCH_PIPELINE, "torch_pipeline", ({"rank": 0} | options, {"rank": 1} | options), 2, environment)


def splits(shape: Shape) -> list[int]:
    """LSTM layers of the first of two stages: the number that shares the products most evenly, and its neighbours."""
    layers = [(inputs + shape.hidden) * 4 * shape.hidden for inputs in inputs_of(shape)]
    last = shape.hidden * shape.vocab
    even = min(range(1, shape.layers + 1), key=lambda split: max(sum(layers[:split]), sum(layers[split:]) + last))
    return [split for split in (even - 1, even, even + 1) if 1 <= split <= shape.layers]


def best_pipelining(shape: Shape, folder: str) -> Contender:
    """A quick scan, three steps each: every split; with the best, every schedule and number of micro-batches."""
    seconds: dict[Cut, float] = {}

    def tried(cut: Cut) -> float:
        if cut not in seconds:
            with started(pipelining(cut, folder), shape) as team:
                team.step()  # shapes are found out in the first
                seconds[cut] = min(team.step()["seconds"] for _ in range(3))
                print(f"  {TORCH_PIPELINE}: {team.about}: {seconds[cut] * 1e3:.1f} ms", file=sys.stderr, flush=True)
        return seconds[cut]

    best = min((Cut("1F1B", split, 4) for split in splits(shape)), key=tried)
    counts = [count for count in (2, 4, 5, 8) if shape.batch_size % count == 0]
    cuts = [Cut(schedule, best.split, count) for schedule in ("1F1B", "GPipe") for count in counts]
    return pipelining(min(cuts, key=tried), folder)


def parameters(team: Team, folder: str) -> Weights:
    """A contender's parameters, those of its processes together."""
    found: Weights = {}
    for place, worker in enumerate(team.workers):
        path = Path(folder, f"{place}.npz")
        worker.ask(do="params", file=str(path))
        worker.reply()
        with np.load(path) as part:
            found |= dict(part)
        path.unlink()
    return found


def tolerances(name: str) -> tuple[float, float]:
    """How far a contender's parameters may be from ours, and how far their change."""
    if name in ALL_ROUNDED:
        return ROUNDED_TOLERANCE, ROUNDED_CHANGE_TOLERANCE
    return TOLERANCE, CHANGE_TOLERANCE


def check_agreement(teams: Sequence[Team], shape: Shape, folder: str) -> dict[str, tuple[float, float]]:
    """Takes five steps with everyone; how far each one's parameters and their change are from ours on one core.

    Raises:
      RuntimeError: parameters do not agree with ours on one core.
    """
    errors: dict[str, tuple[float, float]] = {}
    initial, reference = initial_weights(shape), None
    for team in teams:
        if team.name == PRODUCTS:
            continue
        for _ in range(STEPS):
            team.step()
        found = parameters(team, folder)
        reference = found if reference is None else reference
        errors[team.name] = error, change = disagreement(found, reference, initial)
        allowed, allowed_change = tolerances(team.name)
        if not (error <= allowed and change <= allowed_change):
            raise RuntimeError(
                f"{team.name}: after {STEPS} steps a parameter is {error:.1e} from ours on one core "
                f"({allowed:.0e} is allowed), and the change since the start {change:.1e} ({allowed_change:.0e})"
            )
    return errors


def take_turns(teams: Sequence[Team], rounds: int) -> tuple[dict[str, list[dict[str, float]]], float]:
    """One step of everyone a round; and how many cores other work used meanwhile."""
    steps: dict[str, list[dict[str, float]]] = {team.name: [] for team in teams}
    busy, began = busy_seconds(), time.perf_counter()
    for _ in range(rounds):
        for team in teams:
            steps[team.name].append(team.step())
    taken = time.perf_counter() - began
    own = sum(step["cpu"] for taken_steps in steps.values() for step in taken_steps)
    return steps, max(0.0, (busy_seconds() - busy - own) / taken)


def hold(
    shape: Shape, peers: Sequence[str], plan: Mapping[str, Any], *, rounds: int, unroll: int = 1
) -> dict[str, Any]:
    """A contest on one model.

    Args:
      shape: model and batch.
      peers: of `PEERS`; those that are not installed are named in the result.
      plan: arguments of `make_plan` for ours on two devices.
      rounds: timed steps of each.
      unroll: of our scans.

    Returns:
      What `ratios.report` and `--json` show, without the ratios.

    Raises:
      RuntimeError: a contender failed, or parameters do not agree.
    """
    installed = [peer for peer in peers if importlib.util.find_spec(peer)]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        field = [*contenders(installed, plan, unroll), Contender(PRODUCTS, "matrix_products")]
        if "torch" in installed:
            field.append(best_pipelining(shape, folder))
        teams = [stack.enter_context(started(contender, shape)) for contender in field]
        errors = check_agreement(teams, shape, folder)
        steps, others = take_turns(teams, rounds)
    warn_of_others(others, "while steps were timed")
    limit = [step["result"] for step in steps.pop(PRODUCTS)]
    abouts = {team.name: team.about for team in teams}
    return {
        "shape": describe(shape),
        "tokens": shape.batch_size * shape.time,
        "rounds": rounds,
        "others": others,
        "absent": [peer for peer in peers if peer not in installed],
        "limit": {"seconds": limit, "operations": operations(shape)},
        "contenders": {
            name: {
                "about": abouts[name],
                "seconds": [step["seconds"] for step in taken],
                "cpu": [step["cpu"] for step in taken],
                "peak": taken[-1]["peak"],
                "loss": taken[-1]["result"],
                "disagreement": errors[name][0],
                "change_disagreement": errors[name][1],
            }
            for name, taken in steps.items()
        },
    }
