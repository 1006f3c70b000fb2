"""One contender in a process of its own: builds it, then takes a step whenever the parent asks.

    python -m peers.worker '{"module": "flax_rnn", "shape": {...}, "options": {...}, "cores": [1]}'

Lines of JSON come in on standard input ({"do": "step"}, {"do": "params", "file": ...}) and go out on standard output;
between them the process waits and takes no processor time. It ends when its input does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from peers.problem import Peer, Shape


def peak_bytes() -> int:
    """The most memory that this process has held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """Does what the parent asks for."""
    if request["do"] == "params":
        np.savez(request["file"], allow_pickle=False, **peer.params())
        return {}
    cpu, began = time.process_time(), time.perf_counter()
    result = peer.step()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu": time.process_time() - cpu, "result": result, "peak": peak_bytes()}


def main() -> None:
    """Serves one contender."""
    job = json.loads(sys.argv[1])
    os.sched_setaffinity(0, job["cores"])  # before any library counts the cores
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no reply
    peer: Peer = importlib.import_module(f"peers.{job['module']}").make(Shape(**job["shape"]), **job["options"])
    print(json.dumps({"about": peer.about}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(peer, json.loads(line))), file=replies)


if __name__ == "__main__":
    main()
