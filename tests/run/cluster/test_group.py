"""Process groups of torch.distributed that a run makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.support.forked import answers_of


@pytest.mark.timeout(120)
def test_a_closed_pipeline_leaves_no_threads(tmp_path: Path) -> None:
    """Its groups are destroyed: gloo's threads of 150 pipelines kept two cores busy."""
    answers = answers_of(
        "closing_workers:num_threads_after_each", 4, num_workers=4, folder=tmp_path
    )
    for numbers in answers:
        assert max(numbers) - numbers[0] < 2, numbers  # one group has two
