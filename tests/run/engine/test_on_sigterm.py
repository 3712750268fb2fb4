"""SIGTERM ends a run after a step, the same on all workers, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info

import hocket
from hocket.env import ExitCode
from hocket.errors import ConfigError
from hocket.run.checkpoint.format.folder import saved, step_of
from hocket.run.data.sample_loader import SampleLoader
from hocket.run.diagnostics.process_wide import signal_handler
from tests.run.checkpoint.jobs import make_pipeline
from tests.run.support import stopping_workers as stopping
from tests.run.support.forked import CALM_TIMEOUT_S, run_forked
from tests.run.support.numbered_samples import Numbered
from tests.run.support.small_models import batches

TRAIN: Final = "tests.run.support.stopping_workers:train"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def alone() -> Iterator[hocket.Pipeline]:
    """A pipeline of this process alone."""
    with make_pipeline(None, {"model": "perceptron"}) as pipeline:
        yield pipeline


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ([0, 1], {}),
        ([0], {}),  # which does not have the losses
        ([0], {"num_replicas": 2}),
        ([0, 1], {"schedule": "wpipe"}),
    ],
)
def test_all_workers_end_after_one_step_and_go_on_there(
    tmp_path: Path, asked: list[int], settings: dict[str, Any]
) -> None:
    """Also if the signal came to one of them; the losses are those of a whole run."""
    case = {"model": "dropout", "profiles": str(tmp_path / "profiles"), **settings}
    folder = tmp_path / "checkpoints"

    def run(job: str, folder: Path, asked: list[int]) -> Any:
        (tmp_path / job).mkdir()
        where, how = tmp_path / job, (case, str(folder), asked)
        return run_forked(TRAIN, *how, folder=where, timeout_s=CALM_TIMEOUT_S)

    stopped = run("stopped", folder, asked)
    ended = dict.fromkeys(range(2), ExitCode.TERMINATED)
    assert stopped.codes == ended, (stopped.reports, stopped.output)
    [step] = [step_of(path) for path in saved(folder)]
    assert stopping.ASKED_AFTER < step < stopping.NUM_STEPS
    rest = run("rest", folder, [])
    whole = run("whole", tmp_path / "never", [])
    assert rest.codes == whole.codes == {0: 0, 1: 0}, (rest.reports, whole.reports)
    assert len(whole.results[0]) == stopping.NUM_STEPS
    assert rest.results == whole.results


def test_step_ends_as_train_does(alone: hocket.Pipeline, tmp_path: Path) -> None:
    """The call behind the first step that had the signal; the pipeline is closed."""
    [batch] = batches("perceptron", 1, 16, 16)
    with alone.on_sigterm(lambda: alone.save(tmp_path)):
        alone.step(batch)
        os.kill(os.getpid(), signal.SIGTERM)
        result = alone.step(batch)
        assert str(result).startswith(f"step 1: loss {result.loss:.4f}, ")
        with pytest.raises(SystemExit) as ended:
            alone.step(batch)
    assert ended.value.code == ExitCode.TERMINATED
    assert hocket.checkpoint.newest(tmp_path) == tmp_path / "step-00000002"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_no_step_follows_comes_at_the_end(alone: hocket.Pipeline) -> None:
    """To what handles it outside of the block; nothing is saved."""
    came: list[int] = []
    with signal_handler(signal.SIGTERM, lambda *_: came.append(len(came))):
        with alone.on_sigterm(pytest.fail):
            os.kill(os.getpid(), signal.SIGTERM)
            assert not came
        assert came == [0]


def test_a_handler_of_the_users_own_stays(alone: hocket.Pipeline) -> None:
    """It is refused to take its place, by name."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with (
            pytest.raises(ConfigError, match="handler of its own"),
            alone.on_sigterm(pytest.fail),
        ):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)


class Signalled(Numbered):
    """Samples whose reading process gets a SIGTERM from another one, as of torchrun."""

    def inputs(self, rows: Any, draw: Any) -> Any:
        signal_reading_process()
        return super().inputs(rows, draw)


def signal_reading_process() -> None:
    """Send this process a SIGTERM from another one, if it reads for a loader."""
    if get_worker_info() is not None:
        kill = f"import os; os.kill({os.getpid()}, {int(signal.SIGTERM)})"
        subprocess.run([sys.executable, "-c", kill], check=True)


class SignalledRows(Dataset[Any]):
    """The rows of one batch; their reading process gets a SIGTERM, as of torchrun."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch[0])

    def __getitem__(self, row: int) -> Any:
        signal_reading_process()
        return self.batch[0][row], self.batch[1][row]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_processes_that_read_survive_the_signal() -> None:
    """They died of it, and the worker with them, before it could save."""
    loader = SampleLoader(Signalled(8), 4, seed=0, num_workers=1)
    assert len(list(loader)) == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("is_counted", [False, True], ids=["loader", "counted"])
def test_processes_of_torchs_loader_survive_it_too(
    alone: hocket.Pipeline, is_counted: bool
) -> None:
    """The worker failed before it could save. The user's own function is called."""
    [batch] = batches("perceptron", 1, 16, 16)
    rows, begun = SignalledRows(batch), multiprocessing.Value("i", 0)

    def count(_: int) -> None:
        begun.value += 1

    sampler = hocket.ResumableSampler(len(rows), batch_size=8, seed=0)
    loader = DataLoader(
        rows, batch_sampler=sampler, num_workers=1, worker_init_fn=count
    )
    read: Any = sampler.counted(loader) if is_counted else loader
    assert [x.step for x in alone.train(read)] == [0, 1]
    assert alone.evaluate(loader).loss > 0
    assert begun.value == 2
    assert loader.worker_init_fn is count
