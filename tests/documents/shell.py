"""The commands of the documents: what they need, and how a test calls them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from typer.testing import CliRunner

import hocket
from hocket.cli.main import LazyCommand, app
from hocket.cli.train import with_workers
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.shared import refuse_unshared
from tests.documents.blocks import ROOT, blocks_of
from tests.recipes.support.cifar_folder import cifar100
from tests.recipes.support.real_data import real

TRAINING: Final = frozenset({"train", "share"})
BUILTIN: Final = ROOT / "src/hocket/recipes/builtin"


def hocket_words(words: Sequence[str]) -> list[str] | None:
    """The words behind `hocket`, also of `torchrun ... -m hocket`; else None."""
    if words[0] == "hocket":
        return list(words[1:])
    if words[0] == "torchrun" and "hocket" in words:
        return list(words[words.index("hocket") + 1 :])
    return None


def read(words: Sequence[str], folder: Path) -> None:
    """Check a command without running it: options, and a recipe's settings.

    Args:
        words: behind `hocket`.
        folder: where a recipe's file would be; built-in ones need none.
    """
    name, *rest = words
    given = LazyCommand(name).load().make_context(name, rest).params
    if name == "train":
        settings = with_workers(given["settings"], given["workers"], given["layout"])
        resolve(_found(given["recipe"], folder), settings, allow_outside=True)
    for source in given["recipes"] if name == "share" else ():
        settings = given["settings"] or []
        resolved = resolve(_found(source, folder), settings, allow_outside=True)
        refuse_unshared(resolved.recipe)


def _found(source: str, folder: Path) -> str:
    """A recipe's name, or its file in one of two folders."""
    if not source.endswith(".toml"):
        return source
    found = [path for path in (folder / source, ROOT / source) if path.exists()]
    assert found, f"{source} is in no folder"
    return str(found[0])


def run(words: Sequence[str]) -> None:
    """Run a command in this process; it must succeed."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"hocket {' '.join(words)}\n{done.output}"


def run_script(words: Sequence[str], folder: Path) -> str:
    """Return what `python ...` or `torchrun ...` prints; it must succeed."""
    # A port of its own for each job: two tests may run at the same time.
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    module = {"python": [], "torchrun": torchrun}[words[0]]
    done = subprocess.run(
        [sys.executable, *module, *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stderr}"
    return done.stdout


def prepare(document: Path, folder: Path) -> None:
    """Write the files that the commands of a document name.

    Args:
        document: the page.
        folder: the current directory of its commands.
    """
    FILES.get(document.name, _nothing)(folder)
    for script in document.parent.glob("*.py"):
        shutil.copy(script, folder)


def find_data(folder: Path) -> None:
    """Put data where the commands look for them: real ones, or small files in the form.

    The test is skipped where there are no real data beside the repository.
    """
    for name, there in DATA.items():
        (folder / name).symlink_to(real(there.partition("/")[0]).parent / there)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "MNLI").mkdir()
    for name in ("train.tsv", "dev_matched.tsv"):
        (folder / "MNLI" / name).write_text(_rows_of_mnli())
    (folder / "cifar-100-python").mkdir()
    cifar100(folder / "cifar-100-python", 256)


def _rows_of_mnli() -> str:
    """Pairs of sentences in the form of GLUE's task."""
    labels = "entailment", "neutral", "contradiction"
    rows = [f"a man {i} runs\ta man {i} moves\t{labels[i % 3]}" for i in range(256)]
    return "\n".join(["sentence1\tsentence2\tgold_label", *rows]) + "\n"


def _nothing(folder: Path) -> None:
    """For pages whose commands need no file."""


def _recipes(*names: str) -> Callable[[Path], None]:
    """Recipes of the reader's own, which are that of the digits."""

    def write(folder: Path) -> None:
        for name in names:
            shutil.copy(BUILTIN / "digits-vit.toml", folder / name)

    return write


def _own_hardware(folder: Path) -> None:
    """The file that the page itself shows, and a recipe."""
    page = ROOT / "docs/reference/hardware.md"
    (folder / "mine.toml").write_text(next(blocks_of(page, "toml")))
    _recipes("recipe.toml")(folder)


def _order_of_torch(folder: Path) -> None:
    """An order in torch's form, with which digits-vit can be trained."""
    order = hocket.make_schedule("dualpipe-v", num_devices=2, num_microbatches=8)
    order.to_csv(folder / "dualpipe.csv")


def _checkpoints(folder: Path) -> None:
    """A run's checkpoint."""
    from tests.run.checkpoint.made import save

    (folder / "runs/mine").mkdir(parents=True)
    save(folder / "runs/mine/checkpoints", step=1)


# What the pages call data, and where real data are.
DATA: Final = {
    "cifar-10-batches-py": "cifar-10-batches-py",
    "MRPC": "mrpc",
    "SST2": "sst2",
    "multi30k": "multi30k",
    "FILE": "text/tinyshakespeare.txt",
    "book.txt": "text/tinyshakespeare.txt",
}

FILES: Final[dict[str, Callable[[Path], None]]] = {
    "plan.md": _recipes("mine.toml"),
    "share.md": _recipes("my-recipe.toml"),
    "several-machines.md": _recipes("recipe.toml"),
    "hardware.md": _own_hardware,
    "exchange-with-torch.md": _order_of_torch,
    "save-and-resume.md": _checkpoints,
    "checkpoint.md": _checkpoints,
    "draw.md": _order_of_torch,
    "check.md": _order_of_torch,
    "simulate.md": _order_of_torch,
}


def is_slow(words: Sequence[str]) -> bool:
    """Whether a command trains, plans or starts workers: long tests run it."""
    return words[0] in {*TRAINING, "plan", "profile"} or "--workers" in words


def cut_short(words: Sequence[str]) -> Iterator[str]:
    """A command that trains, with a few steps of it."""
    yield from words
    if words[0] == "share":
        yield from ("--max-steps", "4", "--mode", "turns")
        return
    few = ["training.num_epochs=1", "checkpoint.every_epochs=1"]
    if not any("digits" in word for word in words[:2]):
        few = ["training.max_steps=2"]
    for setting in (*few, "run.profile_folder=profiles"):
        yield from ("--set", setting)
