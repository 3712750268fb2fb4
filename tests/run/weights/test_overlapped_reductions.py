"""With replicas, one group's reduction goes on while the other group's work does."""

from __future__ import annotations

from pathlib import Path

from hocket.core.op import Kind, Op
from tests.run.support.forked import answers_of
from tests.run.support.slow_replica import NUM_STEPS


def test_only_its_update_waits_for_a_reduction(tmp_path: Path) -> None:
    """WPipe on two replicas of one device, the second slower.

    The first has begun its reduction, and computes for the other group before the
    second has begun its own. Each group has one reduction a step.
    """
    fast, slow = answers_of("slow_replica:train", folder=tmp_path)
    reductions = [
        Op(Kind.REDUCE, stage, None, step)
        for step in range(NUM_STEPS)
        for stage in (1, 0)
    ]
    assert {op for op in fast if "R" in op} == set(map(str, reductions))
    for reduction in reductions[:-2]:  # behind the last step's there is nothing to do
        begin_s, end_s = fast[str(reduction)], slow[str(reduction)]
        meanwhile = [op for op, start_s in fast.items() if begin_s < start_s < end_s]
        others = [op for op in meanwhile if op[0] != str(reduction.stage)]
        assert any("F" in op for op in others), (str(reduction), meanwhile)
