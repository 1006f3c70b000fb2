"""Settings of the whole process, which a library leaves alone: for the command line and for scripts.

All of them come before JAX starts its devices, which it does when it is first asked for one, not when it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mp_lstm.errors import InputError

# glibc's mallopt(parameter, value), from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_MALLOC = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1))


# What `mp-lstm launch` tells its processes.
COORDINATOR, PROCESSES, PROCESS = "MP_LSTM_COORDINATOR", "MP_LSTM_PROCESSES", "MP_LSTM_PROCESS"
LAUNCHER = "MP_LSTM_LAUNCHER"
SHUTDOWN = 30
"""Seconds that a process waits at its end for the others'."""


class Member(NamedTuple):
    """One process of several; None: as the cluster's own variables say.

    Args:
      coordinator: address and port of process 0.
      processes: their number.
      process: number of this one.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


def set_allocator() -> bool:
    """Makes malloc keep the memory that a step frees, for the next one.

    By default glibc gives large blocks back at once and takes page faults by the ten thousand in every step. Steps are
    8-13% faster without; all three settings are needed for it, the trim threshold alone is slower than none.

    Returns:
      Whether it was done: only glibc on Linux is known to gain.

    Example:
      >>> import mp_lstm.launch
      >>> done = mp_lstm.launch.set_allocator()
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in _MALLOC)


def emulate_devices(n: int) -> None:
    """Makes JAX run on n emulated CPU devices, instead of the devices of this machine.

    Nothing is started by this. A second call before JAX starts changes the number; one after it may only ask for what
    there already is.

    Args:
      n: number of devices.

    Raises:
      InputError: n is not positive, or JAX has already started on other devices.

    Example:
      >>> import jax, mp_lstm
      >>> mp_lstm.emulate_devices(4)
      >>> len(jax.devices())
      4
    """
    import jax

    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InputError(f"emulate_devices is {n!r}, a whole number of at least 1 is wanted")
    try:
        jax.config.update("jax_num_cpu_devices", n)  # refused once the devices are started
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        found = jax.devices()
        if len(found) == n and found[0].platform == "cpu":
            return
        raise InputError(
            f"{n} emulated devices are wanted, but JAX has already started with {len(found)} of {found[0].platform}: "
            "call mp_lstm.emulate_devices before anything that uses a device, in a new process"
        ) from error


def check_devices(n: int) -> None:
    """Starts JAX and checks that it has the devices that `emulate_devices` asked for.

    Raises:
      InputError: it has others.

    Example:
      >>> import jax
      >>> check_devices(len(jax.devices()))
    """
    import jax

    found = jax.devices()
    if len(found) != n or found[0].platform != "cpu":
        raise InputError(
            f"{n} emulated devices were asked for, JAX started with {len(found)} of {found[0].platform}: look for "
            "JAX_PLATFORMS or XLA_FLAGS in the environment, and unset them"
        )


def cache_folder() -> Path:
    """The folder for what need not be worked out twice: mp_lstm in $XDG_CACHE_HOME or ~/.cache.

    Example:
      >>> cache_folder().name
      'mp_lstm'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mp_lstm")


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keeps compiled programs on disk, so that the next run of the same shapes starts at once.

    A cache that the user has configured (JAX_COMPILATION_CACHE_DIR) stays as it is. Where the folder cannot be written
    to, there is no cache.

    Args:
      folder: where; None: `cache_folder()`.

    Returns:
      The folder in use, None where there is none.

    Example:
      >>> enable_compilation_cache("cache")  # doctest: +SKIP
      PosixPath('cache')
    """
    if configured := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(configured)
    path = Path(folder or cache_folder())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(path, os.W_OK):
        return None

    import jax

    jax.config.update("jax_compilation_cache_dir", str(path))
    # Ours are many and small: the default would keep only what took more than a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def member(coordinator: str | None = None, processes: str | None = None, process: int | None = None) -> Member | None:
    """Which process of several this one is, by what the command line or `mp-lstm launch` says; None: of none.

    Args:
      coordinator: address and port of process 0.
      processes: their number, or "auto": all of it as the cluster says.
      process: number of this one.

    Raises:
      InputError: what is given is no number, or not all of it is given.

    Example:
      >>> member("10.0.0.1:4321", "2", 1)
      Member(coordinator='10.0.0.1:4321', processes=2, process=1)
    """
    if coordinator is processes is process is None:
        if COORDINATOR not in os.environ:
            return None
        coordinator, processes = os.environ[COORDINATOR], os.environ[PROCESSES]
        process = int(os.environ[PROCESS])
    if processes == "auto":
        return Member(coordinator, None, process)
    missing = [
        name
        for name, value in (("--coordinator", coordinator), ("--processes", processes), ("--process", process))
        if value is None
    ]
    if missing:
        raise InputError(
            f"{missing[0]} is not given: give --coordinator HOST:PORT, --processes N and --process I to each process, "
            "or --processes auto where SLURM, Open MPI or Kubernetes starts them"
        )
    count = int(str(processes)) if str(processes).isdecimal() else 0
    if count < 1:
        raise InputError(f"--processes is {processes!r}, wanted a number of at least 1, or auto")
    if process is None or not 0 <= process < count:
        raise InputError(f"--process is {process}, wanted 0 to {count - 1} of {count} processes")
    return Member(coordinator, count, process)


def join(member: Member, emulated: int | None, timeout: float | None) -> None:
    """Makes this process one of several; comes before JAX starts its devices.

    Each process has one CPU device more than stages are given: for what passes between processes.

    Args:
      member: which one.
      emulated: CPU devices of all processes together; None: the machine's own devices.
      timeout: seconds that a process waits for what another sends; None: as long as it lives.

    Raises:
      InputError: the processes are not to be found, or the devices do not divide among them.
    """
    import jax
    from jax._src import distributed

    from mp_lstm.runtime import watchdog

    _end_with_the_launcher()
    _say_why_on_abort()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which ends a run well
    # The watchdog comes first: it can say what it waits for.
    heartbeat = 100 if timeout is None else int(2 * timeout) + 10
    try:
        jax.distributed.initialize(
            *member,
            initialization_timeout=300 if timeout is None else max(60, int(timeout)),
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except ValueError as error:
        raise InputError(
            f"no other processes were found ({error}): give --coordinator, --processes and --process to each, or use "
            "mp-lstm launch"
        ) from error
    count = distributed.global_state.num_processes
    if emulated is not None:
        if emulated % count:
            raise InputError(
                f"train.emulate_devices is {emulated}, which {count} processes cannot share evenly: wanted a multiple "
                f"of {count}"
            )
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", (emulated or count) // count + 1)
    watchdog.watch(timeout)
    if distributed.global_state.process_id:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # process 0 tells for all


def _end_with_the_launcher() -> None:
    """Has the kernel end this process when `mp-lstm launch` ends, however that does."""
    if (launcher := os.environ.get(LAUNCHER)) is None or platform.system() != "Linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it had ended before
        os._exit(1)


_leaving: list[int] = []  # the exit status of a process that has begun to end
_handlers: list[Any] = []  # what C calls must outlive the call that hands it over


def _say_why_on_abort() -> None:
    """Makes one line and exit status 1 of the abort by which JAX ends a process whose coordinator is gone.

    Python's own handlers do not run while C aborts, so this is one of C's.
    """
    from mp_lstm.runtime import watchdog

    def handle(number: int) -> None:
        if _leaving:
            os._exit(_leaving[0])
        watchdog.give_up("the processes' coordinator has found that one of them stopped, or has stopped itself")

    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(handle))
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _handlers[-1])


def _is_member() -> bool:
    """Whether this process has joined others."""
    return bool(_handlers)


def fail(error: Exception) -> NoReturn:
    """Ends one of several processes that an error has reached: with one line where another process has stopped.

    Args:
      error: otherwise shown with its traceback; raised where no other process waits.
    """
    from mp_lstm.runtime import watchdog

    if not _is_member():
        raise error
    if watchdog.is_of_a_peer(error):
        watchdog.give_up(watchdog.stopped(error))
    traceback.print_exception(error)
    sys.exit(leave(1))


def leave(status: int) -> int:
    """Ends one of several processes that has failed, without waiting for others that wait for it.

    Args:
      status: of its exit.

    Returns:
      The status, where this process has joined no others: it may end as any does.
    """
    if not _is_member():
        return status
    from jax._src import distributed

    _leaving.append(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    client: Any = distributed.global_state.client
    with contextlib.suppress(Exception):  # where all have failed alike, none should end another's way out
        client.wait_at_barrier("mp_lstm/leave", 2000)
    os._exit(status)


def prepare(emulated: int | None, member: Member | None = None, timeout: float | None = None) -> None:
    """Does all of this for a command, before it asks for a device.

    Args:
      emulated: number of emulated devices; None: the machine's own.
      member: which process of several this one is; None: of none.
      timeout: as `join` takes it.

    Raises:
      InputError: they cannot be had.

    Example:
      >>> prepare(None)  # doctest: +SKIP
    """
    set_allocator()
    enable_compilation_cache()
    if member is not None:
        join(member, emulated, timeout)
    elif emulated is not None:
        emulate_devices(emulated)
        check_devices(emulated)
