"""Costs for hardware that is described and not measured: a few rates in a TOML file, or those of one CPU core.

    devices = { h100 = 8 }              # or a list, in the order of the stages: ["h100", "h100", "l4"]

    [device.h100]
    flops_per_second = 4e13             # in large matrix products
    bytes_per_second = 3e12             # of its memory
    memory_bytes = 80e9                 # may be left out: then memory is not checked
    cache_bytes_per_second = 1e13       # for what a scan reads again at every step; may be left out: as its memory
    kernel_seconds = 1e-5               # what a task costs beside its layers

    [link]                              # between any two devices
    bytes_per_second = 5e10
    latency_seconds = 5e-6

A task takes its operations at the flop rate plus its bytes at the memory's: parameters are read once a unit, those of a
scan again at every time step, activations are written or read once. Such times rank plans, and their label says that
they are predictions. Devices are names, "h100:0" to "h100:7", so plans can be made for what is not there.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from mp_lstm.errors import InputError
from mp_lstm.planning.costs import STATE_BYTES, Cost, Kind, RowMemory, Seconds

UPDATE_PASSES = 7  # U reads parameter, gradient and two moments, and writes parameter and moments (Adam)
STATE_VALUES = 2  # optimiser values of a parameter (Adam)


class DeviceRates(NamedTuple):
    """What a device can do.

    Args:
      flops_per_second: floating-point operations in large matrix products.
      bytes_per_second: of the memory that parameters and activations are read from.
      memory_bytes: its size; None: unknown, not checked.
      kernel_seconds: what a task costs beside its layers.
      cache_bytes_per_second: of what a scan reads again at every time step; None: `bytes_per_second`.
    """

    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int | None = None
    kernel_seconds: float = 3e-5
    cache_bytes_per_second: float | None = None


class LinkRates(NamedTuple):
    """What a link between two devices can do."""

    bytes_per_second: float = 5e9
    latency_seconds: float = 3e-5


LINK = LinkRates()
CPU_CORE = DeviceRates(flops_per_second=160e9, bytes_per_second=10e9, cache_bytes_per_second=25e9)  # a server's


@dataclass(frozen=True)
class Calibration:
    """A described machine.

    Args:
      rates: of each device, by name and in order.
      link: between any two of them.
      label: for tables: where the numbers come from.
      otherwise: rates of a device that has no name here; None: there must be none.
    """

    rates: Mapping[str, DeviceRates]
    link: LinkRates = LINK
    label: str = "predicted"
    otherwise: DeviceRates | None = None

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        r"""Reads a TOML file as at the top of this module.

        Args:
          path: of the file.

        Returns:
          The calibration; its devices are named by kind and number.

        Raises:
          InputError: the file is missing or is not TOML, or a field is missing, unknown or out of range.

        Example:
          >>> import tempfile
          >>> text = "devices = { gpu = 2 }\n[device.gpu]\nflops_per_second = 1e13\nbytes_per_second = 1e12\n"
          >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
          ...     _ = file.write(text), file.flush()
          ...     Calibration.load(file.name).devices
          ('gpu:0', 'gpu:1')
        """
        path = Path(path)
        return _described(path.name, _read(path))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices, for `make_plan`."""
        return tuple(self.rates)

    def costs(self, model: Any) -> CalibratedCosts:
        """What the tasks of a model cost on this machine."""
        return CalibratedCosts(model, self)


def default_calibration() -> Calibration:
    """The rates assumed where nothing is measured or described: every device is one core of a server CPU.

    Example:
      >>> default_calibration().label
      'predicted for devices of one CPU core each'
    """
    return Calibration({}, label="predicted for devices of one CPU core each", otherwise=CPU_CORE)


@dataclass(frozen=True)
class CalibratedCosts:
    """Costs of a model by formulas: a `CostModel`.

    Args:
      model: has `rows`, each with `cost(batch size, time steps)`.
      calibration: the machine.
      lean_rows: those that are lean variants.
    """

    model: Any
    calibration: Calibration
    lean_rows: frozenset[int] = frozenset()
    _known: dict[tuple[int, int, int], Cost] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def label(self) -> str:
        """Where the numbers come from."""
        return self.calibration.label

    def seconds(self, kind: Kind, row: int, rows: int, time: int, device: Any) -> Seconds:
        """Time of a row's task: its operations, and what it reads and writes. Nobody shares a described device."""
        cost, rates = self._cost(row, rows, time), self._rates(device)
        again = 0.0
        if kind in ("F", "B"):
            flops = cost.forward if kind == "F" else cost.backward
            moved = cost.parameter_bytes + cost.saved_bytes
            again = cost.step_bytes * (time - 1) / (rates.cache_bytes_per_second or rates.bytes_per_second)
            moved += cost.input_bytes + cost.kept_bytes if kind == "F" else cost.tape_bytes
        elif kind == "W":  # reads the tape, and reads and writes the gradient so far
            flops = cost.weight
            moved = cost.input_bytes + cost.kept_bytes + cost.tape_bytes + 2 * STATE_BYTES * cost.parameters
        else:
            flops, moved = 0.0, UPDATE_PASSES * STATE_BYTES * cost.parameters
        taken = flops / rates.flops_per_second + moved / rates.bytes_per_second + again
        return Seconds(taken, taken)

    def overhead(self, device: Any) -> float:
        """Seconds that a task costs beside its rows."""
        return self._rates(device).kernel_seconds

    def transfer(self, nbytes: int, source: Any, target: Any) -> float:
        """Seconds until `nbytes` have reached another device."""
        link = self.calibration.link
        return link.latency_seconds + nbytes / link.bytes_per_second

    def memory(self, row: int, rows: int, time: int) -> RowMemory:
        """Bytes of a row: two optimiser values a parameter, and temporaries for what its layer states."""
        cost = self._cost(row, rows, time)
        parameters = cost.parameters * STATE_BYTES
        return RowMemory(
            parameters=parameters,
            state=STATE_VALUES * parameters + cost.prepared_bytes,
            largest=parameters,  # as if they were one array
            saved=cost.saved_bytes,
            kept=cost.kept_bytes,
            tape=cost.tape_bytes,
            input=cost.input_bytes,
            output=cost.transfer_bytes,
            scratch_forward=cost.scratch_bytes,
            scratch_backward=cost.scratch_bytes,
            scratch_weight=parameters + cost.scratch_weight_bytes,  # the gradient, before it is added to what there is
        )

    def capacity(self, device: Any) -> int | None:
        """Bytes of a device's memory; None: unknown."""
        return self._rates(device).memory_bytes

    def host(self, device: Any) -> Any:
        """A described device shares its processor with nobody."""
        return device

    def lean(self) -> CalibratedCosts:
        """The same of each row's lean variant, where it has one."""
        variants = [getattr(row, "lean", None) for row in self.model.rows]
        found = frozenset(i for i, variant in enumerate(variants) if variant is not None)
        if not found:  # none has one, or they are lean already
            return self
        rows = (row if variant is None else variant for row, variant in zip(self.model.rows, variants, strict=True))
        return replace(self, model=SimpleNamespace(rows=tuple(rows)), lean_rows=found)

    def _cost(self, row: int, rows: int, time: int) -> Cost:
        key = row, rows, time
        if key not in self._known:
            self._known[key] = self.model.rows[row].cost(rows, time)
        return self._known[key]

    def _rates(self, device: Any) -> DeviceRates:
        rates = self.calibration.rates.get(device) if isinstance(device, str) else None
        rates = rates or self.calibration.otherwise
        if rates is None:
            known = ", ".join(self.calibration.devices)
            what = f"device {device}" if isinstance(device, str) else f"{device!r} is a device of JAX and no name; it"
            raise InputError(f"{what} is not described, these are: {known}: pass devices=calibration.devices")
        return rates


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: pass the path of a calibration in TOML") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML: {error}: correct it there") from None


def _described(file: str, content: Mapping[str, Any]) -> Calibration:
    _check_fields(file, "", content, ("devices", "device", "link"))
    sections = content.get("device", {})
    if not isinstance(sections, dict) or not sections:
        raise InputError(f"{file}: no device is described: add a section [device.NAME]")
    kinds = {name: _section(file, f"device.{name}", section, DeviceRates) for name, section in sections.items()}
    names = _device_kinds(file, content.get("devices", list(kinds)), kinds)
    counted: Counter[str] = Counter()
    rates = {}
    for name in names:
        rates[f"{name}:{counted[name]}"] = kinds[name]
        counted[name] += 1
    what = " + ".join(f"{count} x {name}" for name, count in counted.items())
    link = _section(file, "link", content.get("link", {}), LinkRates)
    return Calibration(rates, link, f"predicted for {what} ({file})")


def _device_kinds(file: str, value: Any, kinds: Mapping[str, DeviceRates]) -> Sequence[str]:
    """The kind of each device, in order."""
    if isinstance(value, dict):
        for name, count in value.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise InputError(f"{file}: devices.{name} is {count!r}, wanted how many there are: write e.g. 8")
        value = [name for name, count in value.items() for _ in range(count)]
    if not isinstance(value, list) or not value:
        raise InputError(f'{file}: devices is {value!r}, wanted names or counts: write ["a", "b"] or {{ a = 8 }}')
    for name in value:
        if name not in kinds:
            raise InputError(f"{file}: devices has {name!r}, which is not described: add a section [device.{name}]")
    return value


def _section(file: str, where: str, section: Any, kind: type[Any]) -> Any:
    """A section's numbers as a DeviceRates or LinkRates."""
    if not isinstance(section, dict):
        raise InputError(f"{file}: {where} is {section!r}, wanted a section: write [{where}]")
    _check_fields(file, f"{where}.", section, kind._fields)
    for name in kind._fields:
        if name not in section and name not in kind._field_defaults:
            raise InputError(f"{file}: {where}.{name} is missing: add it, a number above 0")
    for name, value in section.items():
        least = "of at least 0" if name.endswith("_seconds") else "above 0"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf") or (least == "above 0" and value == 0):
            raise InputError(f"{file}: {where}.{name} is {value!r}, wanted a number {least}: correct it there")
    return kind(**{name: int(value) if name == "memory_bytes" else float(value) for name, value in section.items()})


def _check_fields(file: str, where: str, section: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in section:
        if name not in known:
            raise InputError(f"{file}: {where}{name} is unknown: use one of {', '.join(known)}")
