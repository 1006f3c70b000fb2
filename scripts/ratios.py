"""What a contest says: a table, and the ratios that matter with their floors.

Ratios are of steps of the same round, so that a machine that drifts changes both sides; the median over the rounds
counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OURS, OURS_BOTH, OURS_TWO = "ours, one core", "ours, one device, both cores", "ours, two devices"
TORCH, TORCH_TWO, TORCH_PIPELINE = "PyTorch, 1 thread", "PyTorch, 2 threads", "PyTorch, pipelining"
FLAX, FLAX_ALLOCATOR = "flax", "flax, our allocator"
OURS_ROUNDED, OURS_TWO_ROUNDED = "ours, one core, bfloat16", "ours, two devices, bfloat16"
TORCH_ROUNDED, TORCH_TWO_ROUNDED = "PyTorch, 1 thread, bfloat16", "PyTorch, 2 threads, bfloat16"
ALL_ROUNDED = (OURS_ROUNDED, OURS_TWO_ROUNDED, TORCH_ROUNDED, TORCH_TWO_ROUNDED)
"""Operands of matrix products rounded to bfloat16, as a setting of either library; the rest float32."""
PRODUCTS = "matrix products alone"


class Row(NamedTuple):
    """A ratio: seconds of ours over seconds of the other, and the most it may be for each preset."""

    name: str
    ours: str
    other: str
    floors: Mapping[str, float]


ONE_CORE = "one core / "
TWO_DEVICES = "two devices / "
ROUNDED = "bfloat16: "
LIMIT = "its matrix products"
ROWS = (
    Row(ONE_CORE + "PyTorch 1 thread", OURS, TORCH, {"mxnet": 0.80, "medium": 0.68, "large": 0.84}),
    Row(ONE_CORE + "flax", OURS, FLAX, {"mxnet": 0.56, "medium": 0.56, "large": 0.52}),
    Row(ONE_CORE + "flax, our allocator", OURS, FLAX_ALLOCATOR, {}),
    Row(ONE_CORE + LIMIT, OURS, PRODUCTS, {"mxnet": 1.25, "medium": 1.25, "large": 1.25}),
    Row(TWO_DEVICES + "our one core", OURS_TWO, OURS, {"mxnet": 0.60, "medium": 0.58, "large": 0.59}),
    Row(TWO_DEVICES + "PyTorch pipelining", OURS_TWO, TORCH_PIPELINE, {"mxnet": 0.56, "medium": 0.46, "large": 0.65}),
    Row(TWO_DEVICES + "PyTorch 2 threads", OURS_TWO, TORCH_TWO, {"mxnet": 0.87, "medium": 0.75, "large": 0.94}),
    Row(TWO_DEVICES + "our one device on both cores", OURS_TWO, OURS_BOTH, {"mxnet": 1.0, "medium": 1.0, "large": 1.0}),
    Row(ROUNDED + ONE_CORE + "PyTorch's bfloat16, 1 thread", OURS_ROUNDED, TORCH_ROUNDED, {}),
    Row(ROUNDED + ONE_CORE + "our float32", OURS_ROUNDED, OURS, {}),
    Row(ROUNDED + TWO_DEVICES + "PyTorch's bfloat16, 2 threads", OURS_TWO_ROUNDED, TORCH_TWO_ROUNDED, {}),
    Row(ROUNDED + TWO_DEVICES + "our one core", OURS_TWO_ROUNDED, OURS_ROUNDED, {}),
)
"""The products' floor is the 80% of the limit that is aimed for; the last one is wanted, not required."""


def paired(ours: Sequence[float], other: Sequence[float]) -> float:
    """The median ratio of steps of the same round."""
    return statistics.median(a / b for a, b in zip(ours, other, strict=True))


def ratios(preset: str, result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The ratios of what took part, with floor and verdict.

    Verdicts are "met", "not met", "not counted" (of two devices, unless all rows of one core are there and met), and
    "" where there is no floor. How near a step comes to its products is an aim: it decides nothing about two devices.
    """
    found: dict[str, dict[str, Any]] = {}
    seconds = {name: entry["seconds"] for name, entry in result["contenders"].items()}
    seconds[PRODUCTS] = result["limit"]["seconds"]
    needed = {row.name for row in ROWS if row.name.startswith(ONE_CORE) and preset in row.floors} - {ONE_CORE + LIMIT}
    for row in ROWS:
        if row.ours not in seconds or row.other not in seconds:
            continue
        ratio, floor = paired(seconds[row.ours], seconds[row.other]), row.floors.get(preset)
        verdict = "" if floor is None else "met" if ratio <= floor else "not met"
        if verdict == "met":
            needed.discard(row.name)
        if row.name.startswith(TWO_DEVICES) and verdict and needed:
            verdict = "not counted"
        found[row.name] = {"ratio": ratio, "floor": floor, "verdict": verdict}
    return found


def contenders_table(result: Mapping[str, Any]) -> str:
    """One line a contender: times, tokens, cores, memory, agreement."""
    lines = [
        f"{'':28}  best ms  median ms  tokens/s  to ours  cores busy  peak MB  parameters within  changes within",
    ]
    first = result["contenders"][OURS]["seconds"]
    for name, entry in result["contenders"].items():
        seconds, median = entry["seconds"], statistics.median(entry["seconds"])
        cores = sum(entry["cpu"]) / sum(seconds)
        line = (
            f"{name:28}  {min(seconds) * 1e3:7.1f}  {median * 1e3:9.1f}  {result['tokens'] / median:8.0f}  "
            f"{paired(seconds, first):7.2f}  {cores:10.2f}  {entry['peak'] / 1e6:7.0f}  "
            f"{entry['disagreement']:17.0e}  {entry['change_disagreement']:14.0e}  {entry['about']}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def ratios_table(result: Mapping[str, Any]) -> str:
    """One line a ratio."""
    lines = [f"{'seconds of ours / of the other':53}  ratio  floor"]
    for name, entry in result["ratios"].items():
        floor = "    -" if entry["floor"] is None else f"{entry['floor']:5.2f}"
        lines.append(f"{name:53}  {entry['ratio']:5.3f}  {floor}  {entry['verdict']}".rstrip())
    return "\n".join(lines)


def limit_line(result: Mapping[str, Any]) -> str:
    """How near one core comes to its matrix products alone."""
    limit = statistics.median(result["limit"]["seconds"])
    share = 1 / result["ratios"][ONE_CORE + LIMIT]["ratio"]
    rate = result["limit"]["operations"] / limit / 1e9
    return (
        f"The {result['limit']['operations'] / 1e9:.1f} GFLOP of its matrix products alone take one core "
        f"{limit * 1e3:.1f} ms ({rate:.0f} GFLOP/s): ours reaches {share:.0%} of that limit."
    )


def report(name: str, result: Mapping[str, Any]) -> str:
    """All that is said of a preset."""
    return "\n\n".join(
        [
            f"{name}: {result['shape']}; {result['rounds']} rounds, other work used {result['others']:.2f} cores",
            contenders_table(result),
            limit_line(result),
            ratios_table(result),
            *(f"{peer} is not installed: its rows are missing" for peer in result["absent"]),
        ]
    )
