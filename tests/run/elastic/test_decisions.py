"""What rank 0 decides, or fails to decide, reaches all workers at once."""

from __future__ import annotations

from pathlib import Path

from tests.run.support.forked_launch import launch_forked

WORKERS = "decision_workers"


def test_no_worker_waits_for_an_odd_decision(tmp_path: Path) -> None:
    """Past bug: rank 0 failed to send a numpy integer, and rank 1 waited for it.

    So does no worker for anything else that rank 0 cannot send.
    """
    found = launch_forked(f"{WORKERS}:decide_oddly", num_workers=2, run_dir=tmp_path)
    assert [x["numpy"] for x in found] == [[0, 2], [0, 2]]
    why = "Decides decides on 1.5 after step 1, a float that is no whole number"
    assert found[0]["float"].startswith(f"ConfigError: {why}")
    before = "RunError: rank 0 cannot choose the layers"
    assert found[1]["float"].startswith(f"{before} to freeze at 1: ConfigError: {why}")
    assert found[0]["no JSON"].startswith("TypeError: Object of type object is not")
    assert found[1]["no JSON"].startswith(f"{before}: TypeError: Object of type")
