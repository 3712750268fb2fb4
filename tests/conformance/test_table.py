"""The law's table has a row for each kind, and for each name of `nn.Module`."""

from __future__ import annotations

from torch import nn

from tests.conformance.cases import FILES
from tests.conformance.table import NAMES, ROWS


def test_each_public_name_of_a_module_has_a_row() -> None:
    """A newer torch that adds one asks what hocket makes of it.

    Other libraries set theirs on the class: transformers 5 a `smart_apply`.
    """
    names = {
        name
        for name in dir(nn.Module)
        if not name.startswith("_") and _is_of_torch(getattr(nn.Module, name))
    }
    assert sorted(names - NAMES.keys()) == []


def test_each_file_of_cases_has_a_row() -> None:
    """And each row with cases names a file."""
    files = {module.__name__.rpartition(".")[2] for module in FILES}
    assert {row.file for row in ROWS if row.file} == files


def _is_of_torch(found: object) -> bool:
    """Whether an attribute of the class is no function of another library."""
    home = getattr(found, "__module__", "torch") or "torch"
    return home.partition(".")[0] == "torch"
