"""What every test runs under: emulated devices, strict shapes, and random examples that repeat.

pytest loads this file before it collects a test, so the settings are made before JAX starts a device and before the
package is imported.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

DEVICES = 4

# Nearly all the time of these tests is compilation. Without LLVM's optimisation, XLA's newer emitters and threads to
# compile small programs it takes less than half, and results differ in their last bits only. For programs as users have
# them, `XLA_FLAGS= make test-all`.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

# Shapes and types in the signatures of these rooms are checked at every call.
install_import_hook(["mp_lstm.layers", "mp_lstm.data"], "typechecking.check")

hypothesis.settings.register_profile(
    "gate", max_examples=30, deadline=None, derandomize=True, print_blob=True, database=None
)
hypothesis.settings.register_profile("all", max_examples=300, deadline=None, print_blob=True)
hypothesis.settings.load_profile("gate")


def pytest_configure(config: pytest.Config) -> None:
    """Sets JAX up before the first test module is imported."""
    if config.option.markexpr != "gpu":
        os.environ.setdefault("XLA_FLAGS", FAST_COMPILATION)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")


@contextlib.contextmanager
def enabled_float64() -> Iterator[None]:
    """Makes JAX keep float64 while the context is open.

    The setting is the process's, not the thread's as with `jax.enable_x64`, so that prefetching threads see it too. It
    is part of the key of every cached program: what was compiled before is neither reused wrongly nor lost.
    """
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.fixture
def x64() -> Iterator[None]:
    """Runs a test in float64."""
    with enabled_float64():
        yield


@pytest.fixture(scope="session")
def float64() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The context `float64()` for tests that need both precisions, or float64 inside a hypothesis test."""
    return enabled_float64


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The emulated devices."""
    found = jax.devices("cpu")
    assert len(found) == DEVICES, f"{len(found)} CPU devices instead of {DEVICES}: JAX was started before conftest.py"
    return found


class Coordinator:
    """Keeps what processes say in a table, in place of JAX's."""

    def __init__(self):
        self.words: dict[str, str] = {}

    def key_value_set(self, key: str, word: str) -> None:
        self.words[key] = word

    def blocking_key_value_get(self, key: str, patience: int) -> str:
        return self.words[key]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process one of two."""
    from mp_lstm.runtime import processes

    coordinator = Coordinator()
    monkeypatch.setattr(processes, "_client", lambda: coordinator)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.watchdog, "_waits", [])

    def become(number: int) -> None:
        monkeypatch.setattr(processes.jax, "process_index", lambda: number)
        monkeypatch.setattr(processes, "_numbers", itertools.count())

    return become
