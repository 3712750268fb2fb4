"""The situations, one file per row of the table, each a small script of a plain loop.

To add one, write a function that returns a `Script` and give it `@case("what it is")`.
If some ways to run it do not give the plain loop's numbers, say what they give:

    @case("a temperature", {"own-1 own-2": refused("temperature")})

`pytest tests/conformance -k temperature` runs it in all ways. `still_open("...")` is
for what is silent today: its test fails when that changes.
"""

from __future__ import annotations

from typing import Final

from tests.conformance.cases import (
    attributes,
    hooks,
    inner_backwards,
    inputs,
    lengths,
    loss_forms,
    losses,
    membership,
    modes,
    modules,
    optimizer_groups,
    optimizers,
    outside,
    randomness,
    skips,
    state,
    weights,
)
from tests.conformance.script import Case

# In the order of the page.
FILES: Final = (
    attributes,
    outside,
    membership,
    modes,
    hooks,
    weights,
    randomness,
    losses,
    loss_forms,
    inputs,
    lengths,
    optimizers,
    optimizer_groups,
    state,
    modules,
    skips,
    inner_backwards,
)
CASES: Final = {
    found.name: found
    for module in FILES
    for found in vars(module).values()
    if isinstance(found, Case)
}
