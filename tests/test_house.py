"""The shape of the package: rooms of a size that one can survey, named in the documents, knowing what they may know."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rayzero"
MOST_FILES = 13  # modules in one folder, __init__.py not counted
ABOVE_THE_STORE = (
    "convert",
    "store",
    "owner",
    "lead",
    "slabs",
    "lanes",
    "kernels",
    "memory",
    "checkpoint",
    "protocol",
    "layout",
)
GROUND = ("telemetry", "config", "concurrency")


def _packages() -> list[str]:
    found = (path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py"))
    return sorted(name for name in found if name != "." and "_pb" not in name)


def _tree(text: str) -> Iterator[str]:
    """The folders and files of ``rayzero/`` that a drawn tree names, as paths."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        entry = re.match(r"( +)([a-z_]+(?:/|\.py))  ", line)
        if entry:
            depth = len(entry[1])
            above = [(at, name) for at, name in above if at < depth] + [(depth, entry[2])]
            yield "".join(name for _, name in above)


README_TREE = (ROOT / "README.md").read_text().partition("\nrayzero/\n")[2].partition("\nprotos/")[0]


ROOMS = [PACKAGE / package for package in _packages()] + [path.parent for path in (ROOT / "lab").glob("*/__init__.py")]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_folder_can_be_surveyed(room: Path) -> None:
    modules = [path for path in room.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_FILES


def test_readme_names_every_package() -> None:
    named = {path.rstrip("/") for path in _tree(README_TREE)}
    assert [package for package in _packages() if package not in named] == []


@pytest.mark.parametrize("path", list(_tree(README_TREE)))
def test_what_readmes_tree_names_exists(path: str) -> None:
    assert (PACKAGE / path).exists()


ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in ARCHITECTURE.split("\n## ")}
READMES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("README.md"))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", ARCHITECTURE))))
def test_files_that_architecture_names_exist(path: str) -> None:
    assert (PACKAGE / path).is_file() or (ROOT / path).is_file()


@pytest.mark.parametrize("package", _packages())
def test_architecture_names_every_room(package: str) -> None:
    assert f"`{package}/" in ARCHITECTURE


@pytest.mark.parametrize("folder", sorted(set(re.findall(r"`((?:[a-z_]+/)+)`", SECTIONS["The rooms"]))))
def test_folders_among_the_rooms_exist(folder: str) -> None:
    assert (PACKAGE / folder).is_dir()


def test_architecture_can_be_read_at_one_sitting() -> None:
    assert len(ARCHITECTURE.encode()) <= 25 * 1024


@pytest.mark.parametrize("readme", READMES)
def test_a_room_tells_of_itself_on_a_page(readme: str) -> None:
    room, text = (ROOT / readme).parent, (ROOT / readme).read_text()
    assert len(text.encode()) <= 6_000
    for path in set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", text)):
        assert any((above / path).exists() for above in (room, PACKAGE, ROOT)), path


def test_rooms_tell_of_themselves_on_few_pages() -> None:
    assert sum((ROOT / readme).stat().st_size for readme in READMES) <= 45_000


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _uses_nn(module: Path) -> bool:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "torch.nn" and [a.name for a in node.names] == ["Parameter"]:
                continue  # which optimizer classes ask for; no module
            if node.module.startswith("torch.nn") or (node.module == "torch" and "nn" in {a.name for a in node.names}):
                return True
        elif (isinstance(node, ast.Import) and any(name.name.startswith("torch.nn") for name in node.names)) or (
            isinstance(node, ast.Attribute) and node.attr == "nn" and _is_torch(node.value)
        ):
            return True
    return False


@pytest.mark.parametrize("package", [*ABOVE_THE_STORE, *GROUND])
def test_nothing_below_the_engine_knows_modules(package: str) -> None:
    assert [str(path) for path in (PACKAGE / package).rglob("*.py") if _uses_nn(path)] == []


def test_the_engine_does_know_modules() -> None:
    assert _uses_nn(PACKAGE / "engine" / "prepare.py")


def test_no_message_of_the_package_names_a_command_that_wheels_do_not_have() -> None:
    assert [str(path) for path in PACKAGE.rglob("*.py") if "-m lab" in path.read_text()] == []


def _public() -> list[tuple[str, str]]:
    """(module, name) of everything that a module of the package offers by ``__all__``."""
    found = []
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "lab").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found += [(module, name) for name in ast.literal_eval(node.value)]
    return found


def test_what_a_module_offers_is_there() -> None:
    offered = _public()
    assert len(offered) > 100
    assert [(module, name) for module, name in offered if not hasattr(importlib.import_module(module), name)] == []


# ---- torch's defaults -------------------------------------------------------------------------------------------

FACTORIES = {function.__name__ for function in _device_constructors()}
WHOLE_NUMBERS = {"randint", "randperm", "tril_indices", "triu_indices"}  # int64 whatever the default is
ON_THE_DEFAULT_DEVICE = {"recipes/model.py", "recipes/planning.py"}  # models that are built where their caller says


def _has_own_dtype(factory: str) -> bool:
    return factory in WHOLE_NUMBERS or factory.startswith("sparse_")


def _left_to_defaults(source: str) -> list[str]:
    """Uses of torch's factories that leave the dtype or the device to what the program has set for all of torch."""
    nodes = list(ast.walk(ast.parse(source)))
    named = {
        id(function)
        for call in nodes
        if isinstance(call, ast.Call)
        for function in (call.func, *call.args[:1])  # also of partial(torch.zeros, ...)
        if isinstance(function, ast.Attribute)
        and {word.arg for word in call.keywords}
        >= ({"device"} if _has_own_dtype(function.attr) else {"dtype", "device"})
    }
    return [
        f"line {node.lineno}: torch.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in FACTORIES
        and _is_torch(node.value)
        and id(node) not in named
    ]


def test_torchs_factories_are_called_with_dtype_and_device() -> None:
    modules = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py") if "_pb" not in path.parts}
    uses = {name: found for name, path in modules.items() if (found := _left_to_defaults(path.read_text()))}
    assert uses.keys() <= ON_THE_DEFAULT_DEVICE, uses


def test_a_factory_without_dtype_or_device_is_found() -> None:
    source = (
        "torch.zeros(2, dtype=x)\nmap(torch.tensor, y)\ntorch.randperm(3, device=z)\ntorch.ones(2, dtype=x, device=z)"
    )
    assert _left_to_defaults(source) == ["line 1: torch.zeros", "line 2: torch.tensor"]
