"""Whether the machine is ours: times taken beside other work mean nothing."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

BUSY = 0.1
"""Cores that other work may use before we warn."""


def busy_seconds() -> float:
    """Processor seconds that this machine has spent on anything, and that were taken from it, since it started."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that are busy now, while this process only waits."""
    before = busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before) / seconds


def warn(text: str) -> None:
    """A warning on standard error, in red."""
    print(f"\033[31mWARNING: {text}\033[0m", file=sys.stderr, flush=True)


def warn_of_others(cores: float, when: str) -> None:
    """Warns if other work uses as many cores."""
    if cores > BUSY:
        warn(f"{when}, other work used {cores:.2f} cores: these times mean little")
