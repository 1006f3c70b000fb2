"""Settings of the whole process, which a library leaves alone: for the command line and for scripts.

All of them come before JAX starts its devices, which it does when it is first asked for one, not when it is imported.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from mp_lstm.errors import InputError

# glibc's mallopt(parameter, value), from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MALLOC = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1))


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


def prepare(emulated: int | None) -> None:
    """Does all of this for a command, before it asks for a device.

    Args:
      emulated: number of emulated devices; None: the machine's own.

    Raises:
      InputError: they cannot be had.

    Example:
      >>> prepare(None)  # doctest: +SKIP
    """
    set_allocator()
    enable_compilation_cache()
    if emulated is not None:
        emulate_devices(emulated)
        check_devices(emulated)
