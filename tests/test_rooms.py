"""Rooms: what a module may import is decided by the room it lives in.

    errors < planning < layers < data < runtime < training < launch < launcher < cli < __main__

A room imports from itself and from those to its left. Every import statement counts, wherever it stands: inside
functions and under TYPE_CHECKING too. The checks read source text, so nothing here imports the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "mp_lstm"

ROOMS = ("errors", "planning", "layers", "data", "runtime", "training", "launch", "launcher", "cli", "__main__")

# Library -> the places that alone may import it, and rooms that must not import it at all.
ONLY_IN = {"orbax": ("training/checkpoint", "training/parts"), "matplotlib": ("training/plots",)}
NEVER_IN = {"planning": ("jax", "jaxlib", "flax", "optax", "orbax")}

ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
READS_ENVIRONMENT = ("cli", "launch", "launcher")


class Module(NamedTuple):
    """A source file: its place in the package without suffix, such as "layers/lstm", and its syntax tree."""

    place: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The room it lives in; the package's own `__init__` lives in none."""
        return self.place.split("/")[0]


class Import(NamedTuple):
    """One imported dotted name, such as "mp_lstm.layers.lstm" or "jax.numpy", and its line."""

    name: str
    line: int


def modules(package: Path) -> Iterator[Module]:
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).with_suffix("").as_posix()
        yield Module(place, ast.parse(path.read_text(encoding="utf-8")))


def imports(module: Module) -> Iterator[Import]:
    """Every import of a module, relative ones made absolute; `from a import b` imports a.b."""
    package = ["mp_lstm", *module.place.split("/")[:-1]]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{start}.{alias.name}", node.lineno)


def within(name: str, parent: str, separator: str) -> bool:
    return name == parent or name.startswith(parent + separator)


def upward_imports(package: Path) -> list[str]:
    """Imports of a room by one that comes before it, and modules that live in no room."""
    found = []
    for module in modules(package):
        if module.place == "__init__":
            continue  # it re-exports what all rooms offer
        if module.room not in ROOMS:
            found.append(f"{module.place}: lives in no room")
            continue
        for name, line in imports(module):
            if not within(name, "mp_lstm", "."):
                continue
            _, _, inside = name.partition(".")
            target = inside.split(".")[0]
            if target not in ROOMS:
                found.append(f"{module.place}:{line}: imports {name}: name the room it is in")
            elif ROOMS.index(target) > ROOMS.index(module.room):
                found.append(f"{module.place}:{line}: {module.room} imports {target}")
    return found


def library_imports(package: Path) -> list[str]:
    """Imports of libraries outside the places that may import them."""
    found = []
    for module in modules(package):
        for name, line in imports(module):
            library = name.split(".")[0]
            homes = ONLY_IN.get(library)
            banned = library in NEVER_IN.get(module.room, ())
            if banned or (homes and not any(within(module.place, home, "/") for home in homes)):
                found.append(f"{module.place}:{line}: imports {library}")
    return found


def environment_reads(package: Path) -> list[str]:
    """Uses of the process environment outside the command line."""
    found = []
    for module in modules(package):
        if module.room in READS_ENVIRONMENT:
            continue
        for name, line in imports(module):
            if name.startswith("os.") and name.removeprefix("os.") in ENVIRONMENT:
                found.append(f"{module.place}:{line}: uses {name}")
        aliases = {
            alias.asname or alias.name
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "os"
        }
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) in aliases:
                found.append(f"{module.place}:{node.lineno}: uses os.{node.attr}")
    return found


def test_the_package_is_found() -> None:
    places = {module.place for module in modules(PACKAGE)}
    assert {"errors", "planning/schedule", "layers/lstm"} <= places


def test_rooms_import_one_way() -> None:
    assert upward_imports(PACKAGE) == []


def test_libraries_stay_in_their_place() -> None:
    assert library_imports(PACKAGE) == []


def test_only_the_command_line_reads_the_environment() -> None:
    assert environment_reads(PACKAGE) == []


@pytest.fixture
def tree(tmp_path: Path):
    """Writes a small package from {place: source} and returns its path."""

    def write(sources: dict[str, str]) -> Path:
        for place, source in sources.items():
            path = tmp_path / f"{place}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("place", "source", "wrong"),
    [
        ("layers/lstm", "from mp_lstm.runtime.pipeline import step", ["layers/lstm:1: layers imports runtime"]),
        ("layers/lstm", "def f():\n    import mp_lstm.data", ["layers/lstm:2: layers imports data"]),
        ("layers/lstm", "from mp_lstm import runtime", ["layers/lstm:1: layers imports runtime"]),
        ("layers/lstm", "from ..training import fit", ["layers/lstm:1: layers imports training"]),
        ("layers/lstm", "from .. import cli", ["layers/lstm:1: layers imports cli"]),
        ("planning/costs", "if TYPE_CHECKING:\n  import mp_lstm.layers", ["planning/costs:2: planning imports layers"]),
        ("errors", "import mp_lstm.planning", ["errors:1: errors imports planning"]),
        ("training/fit", "from mp_lstm.cli import main", ["training/fit:1: training imports cli"]),
        ("data/corpus", "import mp_lstm", ["data/corpus:1: imports mp_lstm: name the room it is in"]),
        ("data/corpus", "from mp_lstm import lstm", ["data/corpus:1: imports mp_lstm.lstm: name the room it is in"]),
        ("helpers", "", ["helpers: lives in no room"]),
        ("layers/lstm", "from mp_lstm.planning.costs import Cost\nfrom . import base\nfrom .base import Layer", []),
        ("cli", "import mp_lstm.launch, mp_lstm.training.fit", []),
        ("__init__", "from mp_lstm.runtime import Pipeline", []),
        ("layers/lstm", "import mp_lstm_extras", []),
    ],
)
def test_upward_imports(tree, place: str, source: str, wrong: list[str]) -> None:
    assert upward_imports(tree({place: source})) == wrong


@pytest.mark.parametrize(
    ("place", "source", "wrong"),
    [
        ("planning/costs", "import jax.numpy as jnp", ["planning/costs:1: imports jax"]),
        ("planning/costs", "def f():\n    from jax import jit", ["planning/costs:2: imports jax"]),
        ("planning/costs", "import optax", ["planning/costs:1: imports optax"]),
        ("training/fit", "import orbax.checkpoint as ocp", ["training/fit:1: imports orbax"]),
        ("training/checkpoints", "import orbax.checkpoint", ["training/checkpoints:1: imports orbax"]),
        ("cli", "from matplotlib import pyplot", ["cli:1: imports matplotlib"]),
        ("planning/costs", "import math\nimport jaxtyping", []),
        ("training/checkpoint", "import orbax.checkpoint as ocp", []),
        ("training/plots", "def f():\n    import matplotlib.pyplot as plt", []),
    ],
)
def test_library_imports(tree, place: str, source: str, wrong: list[str]) -> None:
    assert library_imports(tree({place: source})) == wrong


@pytest.mark.parametrize(
    ("place", "source", "wrong"),
    [
        ("data/corpus", "import os\nhome = os.environ['HOME']", ["data/corpus:2: uses os.environ"]),
        ("data/corpus", "import os as system\nsystem.getenv('HOME')", ["data/corpus:2: uses os.getenv"]),
        ("data/corpus", "from os import environ", ["data/corpus:1: uses os.environ"]),
        ("__init__", "import os\nos.putenv('A', 'b')", ["__init__:2: uses os.putenv"]),
        ("data/corpus", "import os\nos.path.join('a', 'b')", []),
        ("launch", "import os\nos.environ['A'] = 'b'", []),
        ("cli", "from os import getenv", []),
    ],
)
def test_environment_reads(tree, place: str, source: str, wrong: list[str]) -> None:
    assert environment_reads(tree({place: source})) == wrong
