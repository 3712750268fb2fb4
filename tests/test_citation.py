"""`hocket.citation` finds the papers that docstrings name."""

from __future__ import annotations

import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

import hocket
from hocket.errors import PlanError
from hocket.recipes.config.resolve import builtin_names

KEY: Final = re.compile(r"^@\w+\{([^,]+),$", re.MULTILINE)
OURS: Final = {"forward-only"}  # an order that no paper has


def keys(*subjects: object) -> list[str]:
    """The keys of the papers of some subjects."""
    return KEY.findall(hocket.citation(*subjects))


@pytest.mark.parametrize("name", hocket.SCHEDULES)
def test_every_published_order_has_its_paper(name: str) -> None:
    """No schedule is without one, but for the one that is none of a paper's."""
    assert bool(keys(name)) == (name not in OURS)


def test_a_run_has_the_papers_of_its_parts() -> None:
    """Each once, whether a name, recipe, pipeline, class or object names it."""
    pipeline = SimpleNamespace(plan=SimpleNamespace(schedule_name="zb-v"))

    assert keys("wpipe") == ["yang2022wpipe"]
    assert keys("mnli-bert") == ["yang2022wpipe"]  # its comment and its schedule
    assert keys(pipeline, "zb-h1") == ["qi2024zero"]
    assert keys(hocket.freeze.Alpha(1 / 5)) == ["he2021pipetransformer"]
    assert keys(hocket.Byol, hocket.Lars) == ["grill2020byol", "you2017lars"]
    assert keys(hocket.share) == ["wang2021wavelet", "lim2021zico"]
    assert {"he2021pipetransformer", "narayanan2021memory"} <= set(keys("cifar100-vit"))
    assert keys() == []


def test_a_recipe_of_the_users_own(free_dir: Path) -> None:
    """Its schedule and its way to freeze name papers; so may its first comment."""
    text = (
        '# As arXiv:9912.34567 says.\n\n[pipeline]\nschedule = "zb-h1"\n'
        '[freeze]\npolicy = "plasticity"\n'
    )
    Path("mine.toml").write_text(text)
    assert keys("mine.toml") == ["qi2024zero", "wang2023egeria", "arxiv9912.34567"]


def test_an_unknown_name_is_refused() -> None:
    """With the nearest that there is."""
    with pytest.raises(PlanError, match="'wpipe'"):
        hocket.citation("wpip")


def test_every_paper_is_whole_and_is_cited() -> None:
    """Title, author and year, and something of hocket's that names it."""
    text = (files("hocket") / "papers.bib").read_text(encoding="utf-8")
    entries = [entry for entry in text.split("\n\n") if entry.startswith("@")]
    for entry in entries:
        assert entry.count("{") == entry.count("}")
        for field in ("title", "author", "year"):
            assert re.search(rf"^  {field} = \{{.+\}},?$", entry, re.MULTILINE), entry
    counts = Counter(KEY.findall(text))
    assert max(counts.values()) == 1
    public = [
        value
        for value in (getattr(hocket, name) for name in hocket.__all__)
        if isinstance(value, type) or callable(value)
    ]
    freezing = [getattr(hocket.freeze, name) for name in hocket.freeze.__all__]
    cited = keys(*hocket.SCHEDULES, *builtin_names(), *public, *freezing)
    assert set(counts) - set(cited) == set()
