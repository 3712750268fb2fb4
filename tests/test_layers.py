"""Who may import whom: the folders of src/hocket, from the bottom to the top."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).parent.parent / "src" / "hocket"

# A folder imports from its own line and the lines above it, never from those below.
LAYERS: Final = (
    ("background", "errors", "env", "garbage", "nearest", "signatures", "version"),
    ("core",),
    ("schedules", "passes"),
    ("planner", "draw", "options", "freeze"),
    ("citation",),
    ("cuda",),
    ("model", "run"),
    ("teacher", "sharing", "checkpoint"),
    ("recipes",),
    ("cli",),
)
RANK: Final = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
WITHOUT_TORCH: Final = [room for room, rank in RANK.items() if rank < RANK["cuda"]]


def modules_named(node: ast.AST) -> Iterator[str]:
    """The modules that one import statement names; nothing for any other node."""
    match node:
        case ast.Import(names=names):
            yield from (name.name for name in names)
        case ast.ImportFrom(module=str(module), names=names):
            # `from hocket import plan` names a folder too.
            yield from (f"{module}.{name.name}" for name in names)


@cache
def modules_in(source: str) -> tuple[str, ...]:
    """The modules that a file's imports name, at any depth; several tests ask."""
    nodes = ast.walk(ast.parse(source))
    return tuple(module for node in nodes for module in modules_named(node))


def rooms_imported(source: str) -> set[str]:
    """The folders and top modules of hocket that a file imports, at any depth.

    `import hocket` gives the empty name: the public interface, which stands on top.
    """
    parts = [module.split(".") for module in modules_in(source)]
    ours = {".".join(part[1:2]) for part in parts if part[0] == "hocket"}
    return ours - {"__version__"}


def room_of(path: Path) -> str:
    """The folder of src/hocket that a file is in, or the name of a top module."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports_between_rooms() -> set[tuple[str, str]]:
    """`(who, whom)` for every import from one room of the house to another."""
    return {
        (room_of(path), room)
        for path in sorted(SOURCE.rglob("*.py"))
        if room_of(path) in RANK
        for room in rooms_imported(path.read_text())
        if room != room_of(path)
    }


def test_every_folder_has_its_place() -> None:
    """A new folder must be given its place in `LAYERS` before it may hold code."""
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")}
    assert rooms - {"__init__", "__main__"} <= set(RANK)


def test_imports_never_point_up() -> None:
    """The plan knows nothing of what runs it; only the command line knows everything.

    Imports inside functions and under TYPE_CHECKING count: they are knowledge too.
    """
    up = {
        f"{who} imports hocket.{whom}"
        for who, whom in imports_between_rooms()
        if RANK.get(whom, RANK["cli"]) > RANK[who]
    }
    assert not up


def test_neighbours_import_in_one_direction() -> None:
    """Folders of one layer may know each other, but not both each the other."""
    imports = imports_between_rooms()
    assert not {(a, b) for a, b in imports if a < b and (b, a) in imports}


# Rooms within a folder: each imports only those before it.
ROOMS: Final = {
    "run": (
        "diagnostics",
        "cluster",
        "device",
        "comm",
        "data",
        "stage",
        "nets",
        "weights",
        "engine",
        "outoforder",
        "fill",
        "tune",
        "checkpoint",
        "elastic",
    ),
    "model": ("trace", "guards", "capture", "stages", "weights", "profile"),
    "run/outoforder": ("capture", "play", "order"),
}


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_only_those_before_them(folder: str) -> None:
    """A room may be read after those before it, and before those behind it."""
    order = {room: place for place, room in enumerate(ROOMS[folder])}
    wrong = []
    for path in sorted((SOURCE / folder).rglob("*/*.py")):
        room = path.relative_to(SOURCE / folder).parts[0]
        for module in modules_in(path.read_text()):
            prefix = f"hocket.{folder.replace('/', '.')}."
            if not module.startswith(prefix):
                continue
            other = module.removeprefix(prefix).split(".")[0]
            if order.get(other, len(order)) > order[room]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not wrong


def imports_of_modules() -> dict[str, set[str]]:
    """The modules of hocket that each one imports, at any depth, by name."""
    paths = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
        for path in sorted(SOURCE.rglob("*.py"))
    }
    homes = {name.removesuffix(".__init__"): name for name in paths}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        named = modules_in(path.read_text())
        ours = [m.removeprefix("hocket.") for m in named if m.startswith("hocket.")]
        found[name] = {
            homes.get(m) or homes.get(m.rpartition(".")[0]) or "__init__" for m in ours
        } - {name}
    return found


def reached_from(start: str, imports: dict[str, set[str]]) -> set[str]:
    """The modules that a module imports, and those that these import."""
    reached: set[str] = set()
    left = [start]
    while left:
        more = imports[left.pop()] - reached
        reached |= more
        left += more
    return reached


def test_no_module_imports_itself_around_a_circle() -> None:
    """Each module can be read after those that it imports.

    Imports inside functions and under TYPE_CHECKING count.
    """
    imports = imports_of_modules()
    reached = {name: reached_from(name, imports) for name in imports}
    found = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }
    assert not found


def test_every_room_says_where_to_begin() -> None:
    """Each `__init__.py` says what a room may import, and its first file."""
    rooms = [path for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE]
    says = {path: ast.get_docstring(ast.parse(path.read_text())) for path in rooms}
    silent = [
        path.relative_to(SOURCE).as_posix()
        for path, text in says.items()
        if not re.search(r"\bimport", text or "", re.IGNORECASE)
        or not re.search(r"\bBegin\b", text or "")
    ]
    assert len(rooms) > 1
    assert not silent


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_planning_half_runs_without_torch(room: str) -> None:
    """Also through what it imports; the linter sees only direct imports of torch."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if room_of(path) == room]
    names = [".".join(path.relative_to(SOURCE.parent).parts)[:-3] for path in paths]
    program = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=SOURCE.parent, timeout=60, check=False
    )
    assert done.returncode == 0


def names_torch_cuda(source: str) -> bool:
    """Whether code, not its comments, names `torch.cuda`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                return True
            case ast.Import() | ast.ImportFrom():
                if any(
                    f"{name}.".startswith("torch.cuda.") for name in modules_named(node)
                ):
                    return True
    return False


def test_two_files_name_torch_cuda() -> None:
    """What a GPU needs is looked for there: functions, and the adapter of lanes."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if names_torch_cuda(path.read_text())
    }
    assert found == {"cuda.py", "run/device/cuda.py"}
    assert names_torch_cuda("from torch import cuda")
    assert names_torch_cuda("import torch.cuda.nvtx")
    assert not names_torch_cuda("from hocket import cuda")


def test_sees_what_it_looks_for() -> None:
    """The reader of imports finds each form in which one can be written."""
    source = (
        "import hocket.run.engine.lanes.player\n"
        "from hocket import draw\n"
        "from hocket.core.op import Op\n"
        "def f():\n    from hocket.cli.main import app\n"
        "import torch, hocket\n"
    )
    assert rooms_imported(source) == {"run", "draw", "core", "cli", ""}


# What sends, receives, or brings all workers together; a store does not.
BETWEEN_WORKERS: Final = re.compile(
    r"isend|irecv|send|recv|send_object.*|recv_object.*|batch_isend_irecv|barrier"
    r"|broadcast.*|scatter.*|(all_)?(reduce|gather|to_all).*|reduce_scatter.*"
)


def test_only_comm_and_cluster_talk_to_other_workers() -> None:
    """They stage what the backend cannot carry: gloo sends no tensor of a GPU."""
    places = [SOURCE / "run" / "comm", SOURCE / "run" / "cluster"]
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.attr}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not any(path.is_relative_to(place) for place in places)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        if ast.unparse(node.value) in ("dist", "torch.distributed")
        if BETWEEN_WORKERS.fullmatch(node.attr)
    ]

    assert not found
