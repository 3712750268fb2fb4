"""What `hocket.share` refuses before anything starts, and what of a job."""

from __future__ import annotations

import threading
from math import nan
from typing import Any

import pytest
import torch

import hocket
from hocket.errors import ConfigError
from hocket.sharing.policy import Mode


def steps(job: hocket.JobContext) -> tuple[Any, Any]:
    """A job of twelve iterations."""

    def step(batch: int) -> float:
        with job.forward():
            held = torch.ones(64)
        with job.backward():
            del held
        return float(batch)

    return step, range(12)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"memory_bytes": "20GiB"}, r"memory_bytes='20GiB' is no number .* 20 \* 2"),
        ({"memory_bytes": 0}, "memory_bytes=0 is no number of bytes above 0"),
        ({"memory_bytes": nan}, "memory_bytes=nan"),
        ({"memory_bytes": True}, "memory_bytes=True"),
        ({"num_iterations": "5"}, "num_iterations is '5': give a whole number"),
        ({"device": "banana"}, "device 'banana': jobs share a GPU .* or the CPU"),
        ({"device": "meta"}, "device 'meta'"),
        ({"device": "cuda:99"}, "device 'cuda:99': .* torch sees [0-9]+ GPUs"),
        ({"device": ["cpu"]}, "device .* jobs share"),
        ({"mode": Mode.LAG}, "mode <Mode.LAG: 'lag'> is unknown"),
        ({"jobs": hocket.Job("a", steps)}, r"a Job and no list .* hocket.share\(\["),
        ({"jobs": [steps]}, r"jobs\[0\] is a function and no job: give hocket.Job\("),
        ({"jobs": None}, "jobs is a NoneType"),
    ],
)
def test_refuses_arguments_before_anything_starts(
    asked: dict[str, Any], message: str
) -> None:
    """Past bug: each was a traceback, some of them in the threads of jobs."""
    before = threading.active_count()
    arguments = {"jobs": [hocket.Job("a", steps)], "device": "cpu", **asked}
    with pytest.raises(ConfigError, match=message):
        hocket.share(**arguments)
    assert threading.active_count() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_there_is_no_gpu() -> None:
    """Past bug: an AttributeError of a build without CUDA."""
    with pytest.raises(ConfigError, match=r"'cuda': .* sees 0 GPUs here"):
        hocket.share([hocket.Job("a", steps)], device="cuda")


@pytest.mark.parametrize("made", [None, (None, ()), (print, 5), (print,)])
def test_make_must_return_a_step_and_batches(made: Any) -> None:
    """Else it ends its job, with what to return; the other one trains."""
    jobs = [hocket.Job("a", lambda _: made), hocket.Job("b", steps)]
    report = hocket.share(jobs, mode="lag", device="cpu")
    assert "return a function step(batch)" in str(report["a"].error)
    assert isinstance(report["a"].error, ConfigError)
    assert len(report["b"].losses) == 12
