"""Architectures of other libraries, captured and cut, are what they are uncut.

Outputs, gradients and buffers after four microbatches, in one, two and three stages.
The capture leaves the model as it was. A few of them run here, and all of them in
`make test-long`.
"""

from __future__ import annotations

import pytest

from hocket.errors import CaptureError
from hocket.model.capture.capture import capture
from tests.model.capture.test_kept_state import Hidden
from tests.model.capture.test_kept_state import X as SAMPLES
from tests.zoo.catalogue.check import check
from tests.zoo.catalogue.entries import SHORT, all_names, is_installed, library_of

ALLOWED = 1e-12  # relative, in float64: several stages add to one gradient
_OTHERS = [
    pytest.param(name, marks=pytest.mark.long)
    for name in all_names()
    if name not in SHORT
]


def test_has_enough() -> None:
    """With those of test_zoo.py."""
    assert len(all_names()) >= 50
    assert set(SHORT) <= set(all_names())


@pytest.mark.xdist_group("catalogue")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*SHORT, *_OTHERS])
def test_stages_are_the_uncut_model(name: str) -> None:
    """None is refused, and none is changed by the capture."""
    if not is_installed(name):
        pytest.skip(f"{name} needs {library_of(name)}, which is not installed")

    row = check(name)

    assert row.refused == ""
    assert row.changed == ()
    assert row.difference is not None
    assert row.difference <= ALLOWED


def test_state_that_is_kept_is_refused() -> None:
    """As an argument it trains (`state-passed`); kept, the graph would lose it."""
    with pytest.raises(CaptureError, match="keeps state"):
        capture(Hidden(), (SAMPLES,))
