"""The wheel holds all that is needed, and works where there is no repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import pytest

import hocket

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ROOT / "src"
BUILD_S: Final = 200.0
# What a wheel is for: an order, its picture, a plan, published numbers, a run.
COMMANDS: Final = (
    ("check", "1f1b", "--devices", "2", "--microbatches", "4"),
    ("draw", "1f1b", "--devices", "2", "--microbatches", "4", "-o", "1f1b.html"),
    ("plan", "bert-24", "--devices", "2", "--hardware", "v100-32g"),
    ("bench", "wpipe"),
    (
        *("train", "digits-vit", "--workers", "2", "--run-dir", "run"),
        *("--set", "training.num_epochs=1", "--set", "training.max_steps=4"),
        *("--set", "model.width=16", "--set", "model.num_blocks=2"),
        *("--set", "model.mlp_width=16", "--set", "run.profile_folder=profiles"),
    ),
)
IN_THE_REPOSITORY: Final = ("cifar10-resnet", "--set", "data.path=.")

# In one process, since each would import the same; `train` starts two workers.
IN_TURN: Final = """
import json, sys
from hocket.cli.main import app

for command in json.loads(sys.argv[1]):
    app(command, standalone_mode=False)
"""
pytestmark = pytest.mark.xdist_group("wheel")  # one process builds it


def run(command: list[str], cwd: Path, **variables: str) -> None:
    """Run a command without the repository on its path; it must succeed."""
    done = ended(command, cwd, **variables)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def ended(
    command: list[str], cwd: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What a command without the repository on its path said, and ended with."""
    inherited = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive of the working tree."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist"]
    run([*build, "--directory", str(folder)], ROOT)
    (archive,) = folder.glob(f"hocket-{hocket.__version__}.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    pip += ["--no-build-isolation", "--no-index"]
    run([*pip, "--wheel-dir", str(folder), str(archive)], folder)
    (path,) = folder.glob(f"hocket-{hocket.__version__}-*.whl")
    return path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("CITATION.cff", "\nversion: {}\n"),
        ("CHANGELOG.md", "\n## [{}] - "),
        ("docs/install.md", "dist/hocket-{}-py3-none-any.whl"),
    ],
)
def test_pages_name_the_version_of_the_package(path: str, text: str) -> None:
    """`src/hocket/version.py` has it; the build reads it there."""
    expected = text.format(hocket.__version__)
    assert expected in (ROOT / path).read_text(encoding="utf-8")


def test_all_data_are_below_the_package() -> None:
    """The build takes the whole folder `src/hocket`: what is in it is in the wheel."""
    build = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[tool.hatch.build.targets.wheel]\npackages = ["src/hocket"]\n' in build
    tracked = subprocess.run(
        ["git", "check-ignore", "--stdin"],
        cwd=ROOT,
        input="\n".join(str(path) for path in data_files()),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not tracked.stdout, "hatch leaves out what git ignores"


def data_files() -> list[Path]:
    """All files of the package that are no Python."""
    found = [path for path in SOURCE.glob("hocket/**/*") if path.is_file()]
    kept = [path for path in found if path.suffix not in {".py", ".pyc"}]
    assert {".toml", ".json", ".js", ".css", ".html", ".bib"} <= {
        path.suffix for path in kept
    }
    assert SOURCE / "hocket/py.typed" in kept
    return kept


@pytest.mark.timeout(300)
def test_every_data_file_is_in_the_wheel(wheel: Path) -> None:
    """Recipes, tables, templates, hardware, papers and the mark of types."""
    expected = {str(path.relative_to(SOURCE)) for path in data_files()}
    assert expected - set(ZipFile(wheel).namelist()) == set()


@pytest.mark.timeout(500)
def test_the_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, whose other packages are those of this one."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    pip += ["--no-compile"]  # Python compiles what it imports
    run([*pip, "--no-deps", "--no-index", str(wheel)], tmp_path)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # Not as a path file: that would also read the other environment's own path files,
    # and with them an editable install of this repository.
    (others,) = {path for path in sys.path if path.endswith("site-packages")}
    (tmp_path / "others").mkdir()
    for path in Path(others).iterdir():
        if "hocket" not in path.name and path.suffix != ".pth":
            (tmp_path / "others" / path.name).symlink_to(path)
    variables = {"PYTHONPATH": str(tmp_path / "others"), "OMP_NUM_THREADS": "1"}
    where = f"import hocket; assert hocket.__file__.startswith({str(site)!r})"
    run([str(python), "-c", where], tmp_path, **variables)
    run([str(python), "-c", IN_TURN, json.dumps(COMMANDS)], tmp_path, **variables)
    assert (tmp_path / "run/report.html").exists()
    other = [*(str(python), "-m", "hocket", "train"), *IN_THE_REPOSITORY]
    refused = ended(other, tmp_path, **variables)
    assert refused.returncode == 2
    said = " ".join(refused.stderr.split())
    assert "it is in hocket's repository, not in its package: run this in a" in said
