"""Settings of the whole process: what can be seen in this one, and what needs one of its own."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import mp_lstm
from mp_lstm import launch
from mp_lstm.errors import InputError


def in_new_process(code: str, **environment: str) -> list[str]:
    """Runs code in a process that has started no JAX, and returns the lines it prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_devices_are_emulated_whatever_the_environment_says():
    # The second call shows that the first has started nothing: JAX refuses a number once it has.
    code = """
import jax, mp_lstm
mp_lstm.emulate_devices(2)
mp_lstm.emulate_devices(5)
print(len(jax.devices()), jax.devices()[0].platform)
mp_lstm.emulate_devices(5)
"""
    assert in_new_process(code, XLA_FLAGS="--xla_force_host_platform_device_count=3") == ["5 cpu"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, "2", 0), "--coordinator is not given: give --coordinator HOST:PORT, --processes N and --process I to"),
        (("host:1", None, 0), "--processes is not given"),
        (("host:1", "2", None), "--process is not given"),
        (("host:1", "two", 0), "--processes is 'two', wanted a number of at least 1, or auto"),
        (("host:1", "2", 2), "--process is 2, wanted 0 to 1 of 2 processes"),
    ],
)
def test_a_process_of_several_must_be_told_all(given: tuple[str | None, str | None, int | None], message: str):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        launch.member(*given)


def test_which_process_this_is_comes_from_the_command_line_or_the_launcher(monkeypatch: pytest.MonkeyPatch):
    assert launch.member() is None
    assert launch.member(processes="auto") == launch.Member(None, None, None)
    for name, value in ((launch.COORDINATOR, "127.0.0.1:99"), (launch.PROCESSES, "3"), (launch.PROCESS, "2")):
        monkeypatch.setenv(name, value)
    assert launch.member() == launch.Member("127.0.0.1:99", 3, 2)


def test_devices_that_are_there_may_be_asked_for_again(devices: list[jax.Device]):
    mp_lstm.emulate_devices(len(devices))
    launch.check_devices(len(devices))


def test_too_late_is_explained(devices: list[jax.Device]):
    message = (
        f"3 emulated devices are wanted, but JAX has already started with {len(devices)} of cpu: call "
        "mp_lstm.emulate_devices before anything that uses a device, in a new process"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        mp_lstm.emulate_devices(3)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2"])
def test_a_wrong_number_is_explained(n: object):
    with pytest.raises(InputError, match=f"^emulate_devices is {n!r}, a whole number of at least 1 is wanted$"):
        mp_lstm.emulate_devices(n)


def test_devices_that_did_not_come_are_explained(devices: list[jax.Device]):
    with pytest.raises(InputError, match=f"^9 emulated devices were asked for, JAX started with {len(devices)} of cpu"):
        launch.check_devices(9)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_the_allocator_keeps_the_memory_of_large_blocks():
    # With its defaults, glibc maps every large block anew, and each of its pages faults again.
    code = """
import resource
import numpy as np
from mp_lstm import launch
if {set_it}:
    assert launch.set_allocator()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(1 << 22)
before = faults()
for _ in range(5):
    np.ones(1 << 22)
print(faults() - before)
"""
    (default,), (kept,) = (in_new_process(code.replace("{set_it}", str(set_it))) for set_it in (False, True))
    assert int(kept) < 100
    assert int(default) > int(kept)


def test_the_allocator_is_left_alone_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert launch.set_allocator() is False


def test_compiled_programs_are_kept(tmp_path: Path):
    code = """
import jax
from mp_lstm import launch
print(launch.enable_compilation_cache())
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
"""
    assert in_new_process(code, XDG_CACHE_HOME=str(tmp_path)) == [str(tmp_path / "mp_lstm")]
    assert any((tmp_path / "mp_lstm").iterdir())


def test_a_cache_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    assert launch.enable_compilation_cache() == tmp_path
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_no_place_for_a_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    assert launch.enable_compilation_cache(tmp_path / "file" / "cache") is None
