"""Workers start, find each other and are started again; nothing is left of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from hocket.env import ExitCode
from hocket.errors import RunError, WorkerError
from hocket.run.cluster.launch import launch
from tests.run.support.forked_launch import launch_forked
from tests.run.support.forked_python import run_forked_python
from tests.run.support.processes import environment, none_alive_within

HERE: Final = "tests.run.support.launched_workers"
LOOPBACK: Final = {"0100007F", "00000000000000000000000001000000"}  # as in /proc/net

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No worker outlives its test: the test's folder is in their command lines."""
    yield
    assert none_alive_within(str(tmp_path))


def start_two(
    function: str,
    *args: Any,
    by: Callable[..., list[Any]] = launch,
    run_dir: Path,
    **options: Any,
) -> list[Any]:
    """Launch a function of launched_workers.py in two processes."""
    options = {"timeout_s": 5.0, **options}
    entry = f"{HERE}:{function}"
    return by(entry, args, num_workers=2, run_dir=run_dir, **options)


def test_workers_meet_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know each other, share the cores, and listen on the loopback at most.

    The launcher itself listens nowhere, and leaves no file after a good end.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    places = start_two("greet", "hello", run_dir=tmp_path)
    for rank, place in enumerate(places):
        assert set(place.pop("own_listeners")) <= LOOPBACK
        # Two workers of one host have the same clock, so the estimate is all error.
        assert abs(place.pop("estimate_s")) <= place.pop("ping_s") / 2
        assert place == {
            "word": "hello",
            "rank": rank,
            "world_size": 2,
            "same_host": [0, 1],
            "threads": 1,
            "timeout_s": 5.0,
            "offset_s": 0.0,
            "total": 1.0,
            "gathered": [{"rank": 0}, {"rank": 1}],
            "received": "by 1",
            "launcher_listeners": [],
        }
    assert list(tmp_path.iterdir()) == []


def test_workers_may_join_again_and_hear_nothing_of_before(tmp_path: Path) -> None:
    """Two pipelines one after the other, as after `requires_grad` changed.

    The second met the first one's keys in the store: each worker went on with what was
    said before, so that they hung, or connected to a port that was closed.
    """
    for reported in start_two("join_again", by=launch_forked, run_dir=tmp_path):
        first, refused, second, _ = reported
        assert first == [[0, 0], [0, 1], 3.0]
        assert second == [[1, 0], [1, 1], 3.0]
        assert "in a process group already" in refused


def test_restarted_workers_see_nothing_of_those_before(tmp_path: Path) -> None:
    """Each attempt has a store of its own, so all of them can meet in it again."""
    call = f"launch('{HERE}:fail_until', [1], num_workers=2, run_dir='run', "
    done = run_script(
        tmp_path,
        "import json\nfrom hocket.run.cluster.launch import launch\n"
        f"print(json.dumps({call}timeout_s=5.0, max_restarts=3)))\n",
    )
    results = json.loads(done.stdout)
    assert [r["attempt"] for r in results] == [1, 1]
    assert {r["arrival"] for r in results} == {1, 2}
    assert [r["total"] for r in results] == [2.0, 2.0]
    assert done.stderr == (
        "rank 1 was killed by signal 9 (SIGKILL) before its first op; starting the "
        "workers again, 1 of 3\n"
    )


def test_restarts_are_bounded(tmp_path: Path) -> None:
    """The error after the last one is of the last attempt."""
    with pytest.raises(WorkerError, match="rank 1 was killed by signal 9"):
        start_two("fail_until", 9, by=launch_forked, run_dir=tmp_path, max_restarts=1)


def test_no_restart_would_help(tmp_path: Path) -> None:
    """The data would be as bad again: the error names at once what to mend."""
    with pytest.raises(WorkerError, match="3 samples, where 4 are") as caught:
        start_two("refuse", by=launch_forked, run_dir=tmp_path, max_restarts=3)
    assert caught.value.exit_code == ExitCode.USAGE
    assert [path.name for path in tmp_path.rglob("attempt-*")] == ["attempt-0"]


def test_torchrun_restarts_workers(tmp_path: Path) -> None:
    """Also where torchrun is the launcher and its one store serves all attempts."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "from tests.run.support.launched_workers import fail_until\n"
        "result = fail_until(1)\n"
        "pathlib.Path(sys.argv[1], str(result['arrival'])).write_text(str(result))\n"
    )
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    torchrun = ["-m", "torch.distributed.run", *options]
    done = run_forked_python([*torchrun, script, tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'attempt': 1" in (tmp_path / "1").read_text()
    assert "'total': 2.0" in (tmp_path / "2").read_text()


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a user's script in a forked Python."""
    script = folder / "train.py"
    script.write_text(text)
    return run_forked_python([script], folder)


SCRIPT: Final = """
import pathlib, sys
from hocket.run.cluster.launch import launch
from hocket.run.cluster.world import join_world

class Point:
    pass

def train(factor):
    world = join_world()
    assert sys.modules[Point.__module__].Point is Point
    return factor * world.gather_json(world.rank + 1)[world.rank]
"""


def test_launches_functions_of_a_script(tmp_path: Path) -> None:
    """`python train.py` is enough, and nothing but its own output is on the console."""
    call = "print(launch(train, [10], num_workers=2, run_dir='run'))"
    script = tmp_path / "train.py"
    script.write_text(f"{SCRIPT}\nif __name__ == '__main__':\n    {call}\n")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[10, 20]\n", "")


def test_a_script_without_guard_is_reported(tmp_path: Path) -> None:
    """Its workers would start workers, without end."""
    call = "launch(train, [10], num_workers=2, run_dir=pathlib.Path('run'))"
    done = run_script(tmp_path, f"{SCRIPT}\n{call}\n")
    assert done.returncode == 1
    assert 'needs the guard `if __name__ == "__main__":`' in done.stderr


@pytest.mark.parametrize(
    ("entry", "reported"),
    [
        (f"{HERE}:no_such", "has no function 'no_such'"),
        ("no_such.module:f", "No module named 'no_such'"),
        (f"{HERE}:ROOT_OF_ALL.evil", "has no function 'ROOT_OF_ALL.evil'"),
    ],
)
def test_an_entry_that_is_not_there(tmp_path: Path, entry: str, reported: str) -> None:
    """The workers say so before anything else."""
    at_once = r"^rank . raised .* before its first op"
    with pytest.raises(WorkerError, match=at_once) as caught:
        launch_forked(entry, num_workers=1, run_dir=tmp_path)
    assert reported in str(caught.value)


def test_an_entry_that_cannot_be_sent(tmp_path: Path) -> None:
    """A function inside a function goes by value, with all that it refers to."""
    lock = threading.Lock()
    with pytest.raises(RunError, match="cannot be sent to workers: cannot pickle"):
        launch(lambda: lock.locked(), num_workers=1, run_dir=tmp_path)


@dataclass
class Scaled:
    """Multiplies by a number of its own."""

    factor: int

    def __call__(self, x: int) -> int:
        return self.factor * x

    def twice(self, x: int) -> int:
        """The same, twice."""
        return 2 * self.factor * x


@pytest.mark.parametrize(
    ("entry", "found"),
    [(partial(pow, 2), 32), (Scaled(3), 15), (Scaled(3).twice, 30)],
)
def test_callables_without_a_name_are_sent(
    tmp_path: Path, entry: Any, found: int
) -> None:
    """A partial has no `__qualname__`; a method's name does not say of which object."""
    assert launch(entry, [5], num_workers=1, run_dir=tmp_path) == [found]


FROM_STANDARD_INPUT: Final = """
import hocket

width = 3


def scaled(factor):
    from hocket.run.cluster.world import join_world

    return width * factor + join_world().rank


print(hocket.launch(scaled, [2], num_workers=2))
"""


def test_functions_of_a_prompt_are_sent(tmp_path: Path) -> None:
    """Those of a notebook and of standard input, too: no file holds them."""
    ended = subprocess.run(
        [sys.executable, "-"],
        input=FROM_STANDARD_INPUT,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=50,
        check=False,
    )
    assert ended.stdout == "[6, 7]\n", ended.stderr


def test_a_worker_launches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun the processes are there already."""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunError, match="under torchrun, call the function itself"):
        launch(f"{HERE}:greet", num_workers=2, run_dir=tmp_path)


def test_at_least_one_worker(tmp_path: Path) -> None:
    """No workers would do no work."""
    with pytest.raises(RunError, match="num_workers=0"):
        launch(f"{HERE}:greet", num_workers=0, run_dir=tmp_path)


@pytest.mark.parametrize("how", ["return", "sys.exit", "os._exit"])
def test_a_worker_that_leaves_early_is_the_first_failure(
    tmp_path: Path, how: str
) -> None:
    """Its exit code is 0, but another one waited for it."""
    with pytest.raises(WorkerError) as caught:
        start_two("leave", str(tmp_path), how, by=launch_forked, run_dir=tmp_path)
    assert caught.value.rank == 1
    assert str(caught.value).startswith("rank 1 ended with exit code 0")
    assert "rank 0 gave up at step 3 in 0B0" in str(caught.value)


def test_what_a_dead_worker_started_dies_with_it(tmp_path: Path) -> None:
    """`nothing_left` looks for it: the test's folder is in its command line."""
    with pytest.raises(WorkerError, match="rank 1 was killed"):
        start_two("leave_a_process", str(tmp_path), by=launch_forked, run_dir=tmp_path)
