"""A ranking as the command shows it: text, JSON and a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hocket.core.formats.costs_json import to_json
from hocket.planner.ranking.ranking import Ranking
from hocket.planner.ranking.report import to_html
from hocket.planner.ranking.table import to_text


@dataclass(frozen=True, slots=True)
class Paper:
    """How a ranking is to be shown.

    Args:
        num_rows: the table's rows.
        width: columns of text.
        is_terminal: whether colours can be seen.
        has_page: whether an HTML page is wanted.
        has_all: whether all rows and columns are wanted.
    """

    num_rows: int
    width: int
    is_terminal: bool
    has_page: bool
    has_all: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """A ranking as it is shown.

    Args:
        text: the table, the choice, the picture.
        document: all outcomes, as JSON has them.
        page: HTML; empty where none was wanted.
        costs: those of the best pipeline, as JSON; empty without one.
        simulation: the command that simulates it with these costs, but for their file.
    """

    text: str
    document: dict[str, Any]
    page: str
    costs: str = ""
    simulation: str = ""

    @classmethod
    def of(cls, ranking: Ranking, paper: Paper) -> Shown:
        """Draw it.

        Raises:
            PlanError: a page was wanted, and nothing fits.
        """
        text = to_text(
            ranking,
            num_rows=paper.num_rows,
            width=paper.width,
            is_terminal=paper.is_terminal,
            has_all=paper.has_all,
        )
        page = to_html(ranking) if paper.has_page else ""
        document = ranking.to_json()
        if ranking.costs is None or ranking.pipeline is None:
            return cls(text, document, page)
        candidate = ranking.pipeline.candidate
        simulation = (
            f"hocket simulate {candidate.schedule} --devices {candidate.num_devices} "
            f"--stages-per-device {candidate.stages_per_device} "
            f"--microbatches {candidate.num_microbatches} "
            f"--replicas {candidate.num_replicas} --costs"
        )
        return cls(text, document, page, to_json(ranking.costs), simulation)
