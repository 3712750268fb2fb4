"""A recipe: sections that agree with each other."""

from __future__ import annotations

from pydantic import model_validator

from hocket.recipes.config.cross_section_checks import cross_section_faults
from hocket.recipes.config.sections import Sections


class Recipe(Sections):
    """A complete task: what to train on what, how long, and in which order of work."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if faults := tuple(cross_section_faults(self)):
            raise ValueError("\n".join(faults))
        return self
