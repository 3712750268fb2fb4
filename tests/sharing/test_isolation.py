"""What one job does to all at once is refused, or ends those that it has touched."""

from __future__ import annotations

import gc
import queue
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket import JobContext
from hocket.errors import ConfigError, NoMemoryError, RunError
from hocket.sharing.running.shared_state import read_settings, set_settings
from tests.sharing.support.jobs import Trained, gan, train_alone

NUM: Final = 24
MEET: Final = 40  # the first iterations of all jobs run in turns
Make = Callable[[JobContext], tuple[Any, Any]]


def plain(
    act: Callable[[int], Any] = lambda i: None, *, num: int = NUM, sleep_s: float = 0.0
) -> Make:
    """A job without random numbers, which does something more in its forward."""

    def make(job: JobContext) -> tuple[Any, Any]:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], 0.1)

        def step(i: int) -> torch.Tensor:
            optimizer.zero_grad()
            with job.forward():
                act(i)
                time.sleep(sleep_s)
                loss = weight.square().mean()
            with job.backward():
                loss.backward()
            optimizer.step()
            return loss.detach()

        return step, range(num)

    return make


def from_thread(draw: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Batches that a thread draws ahead."""
    ready: queue.Queue[torch.Tensor] = queue.Queue(2)

    def fill() -> None:
        while True:
            ready.put(draw())

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield ready.get()


def from_pool(draw: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Batches that an executor's thread draws."""
    with ThreadPoolExecutor(1) as pool:
        while True:
            yield pool.submit(draw).result()


def seeding() -> torch.Tensor:
    """A draw that is always the same."""
    torch.manual_seed(1)
    return torch.randn(4)


def given_default() -> torch.Tensor:
    """A draw from the default generator by name, as `random_split` makes it."""
    real = getattr(torch.default_generator, "_real", torch.default_generator)
    return torch.randn(4, generator=real)


def prefetching(source: Any, draw: Callable[[], torch.Tensor]) -> Make:
    """A job whose batches come from a thread of its own."""
    return lambda job: (plain()(job)[0], source(draw))


@pytest.mark.parametrize("mode", ["turns", "budget"])
@pytest.mark.parametrize(
    ("source", "draw", "drawn"),
    [
        (from_thread, lambda: torch.randn(4), r"aten\.randn"),
        (from_pool, lambda: torch.randn(4), r"aten\.randn"),
        (from_pool, given_default, r"aten\.randn"),
        (from_pool, seeding, "manual_seed"),
    ],
)
def test_a_thread_of_a_job_draws_from_its_own_generator(
    mode: str, source: Any, draw: Any, drawn: str
) -> None:
    """Past bug: what a job's thread drew was missing from all jobs' numbers, silently.

    The job ends, though it waits for the thread; the other one is what it is alone.
    """
    start = threading.Thread.start
    jobs = [
        hocket.Job("a", prefetching(source, draw)),
        hocket.Job("b", gan("b", Trained())),
    ]
    report = hocket.share(jobs, mode=mode, num_iterations=NUM, device="cpu")
    assert threading.Thread.start is start
    assert list(report["b"].losses) == train_alone(gan("b", Trained()), NUM, 0)
    assert not report["a"].losses
    assert isinstance(report["a"].error, RunError)
    with pytest.raises(RunError, match=f"job 'a' has started drew .*{drawn}.*num_work"):
        report.check()


@pytest.mark.parametrize("mode", ["turns", "budget"])
def test_a_thread_may_have_a_generator(mode: str) -> None:
    """Its numbers are its own; the other job is what it is alone."""
    own = torch.Generator().manual_seed(3)
    jobs = [
        hocket.Job(
            "a", prefetching(from_thread, lambda: torch.randn(4, generator=own))
        ),
        hocket.Job("b", gan("b", Trained())),
    ]
    report = hocket.share(jobs, mode=mode, num_iterations=NUM, device="cpu")
    report.check()
    assert list(report["b"].losses) == train_alone(gan("b", Trained()), NUM, 0)


class Noise(Dataset[torch.Tensor]):
    """Samples that are drawn when they are asked for."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(torch.randn(4)))
        thread.start()
        thread.join()
        return found[0] + torch.randn(4)


def test_a_worker_of_a_loader_has_generators_of_its_own() -> None:
    """Its process draws as it does alone, in threads too."""

    def make(job: JobContext) -> tuple[Any, Any]:
        step, _ = plain()(job)
        loader = DataLoader(Noise(), batch_size=4, num_workers=1)
        return (lambda batch: (step(0), float(batch.sum()))[1]), loader

    jobs = [hocket.Job("a", make), hocket.Job("b", gan("b", Trained()))]
    report = hocket.share(jobs, mode="budget", num_iterations=4, device="cpu")
    report.check()
    assert list(report["a"].losses) == train_alone(make, 4, 0)


@pytest.mark.parametrize("mode", ["free", "budget", "lag"])
def test_a_late_draw_ends_each_job_that_may_have_drawn(mode: str) -> None:
    """Past bug: the job that looked first ended, and the one that drew trained on."""

    def act(i: int) -> None:
        if i >= 12:
            torch.randn(3)
        time.sleep(0.002)

    jobs = [
        hocket.Job("a", plain(act, num=60)),
        hocket.Job("b", plain(sleep_s=0.002, num=60)),
    ]
    report = hocket.share(jobs, mode=mode, device="cpu")
    error = report["a"].error
    assert isinstance(error, RunError)
    assert "draws=True" in str(error)
    assert len(report["a"].losses) == 12
    if report["b"].error is not None:
        assert "jobs 'a', 'b' drew" in str(report["b"].error)
    assert (
        list(report["b"].losses)
        == train_alone(plain(num=60), 60, 0)[: len(report["b"].losses)]
    )


def meeting(*acts: Callable[[], Any]) -> list[Make]:
    """Jobs that do something, one after the other, while all are in iteration MEET."""
    barrier = threading.Barrier(len(acts))

    def part(number: int) -> Make:
        def act(i: int) -> None:
            time.sleep(0.002)
            for turn in range(-1, len(acts)) if i == MEET else ():
                if turn == number:
                    acts[number]()
                barrier.wait(20.0)

        return plain(act, num=2 * MEET)

    return [part(number) for number in range(len(acts))]


@pytest.mark.parametrize("draws", [None, False])
def test_all_that_ran_beside_a_draw_end(draws: bool | None) -> None:
    """Each error names both, and the way out; none counts the iteration.

    One whose draws are guarded ends, too, if it drew meanwhile: if both were at the
    same moment, its numbers are wrong.
    """
    makes = meeting(lambda: torch.randn(2), lambda: torch.randn(2), lambda: None)
    jobs = [
        hocket.Job(name, make, draws=own)
        for name, make, own in zip("cab", makes, (True, draws, draws), strict=True)
    ]
    report = hocket.share(jobs, mode="free", device="cpu")
    for job in report.jobs:
        assert f"job {job.name!r} ends, as its results may be wrong" in str(job.error)
        assert "one of jobs 'a', 'b' drew its first" in str(job.error)
        assert "draws=True" in str(job.error)
        assert len(job.losses) == MEET


def test_all_that_ran_beside_a_changed_setting_end() -> None:
    """Past bug: the one that looked first ended, and the guilty one trained on."""
    makes = meeting(lambda: torch.set_float32_matmul_precision("high"), lambda: None)
    jobs = [hocket.Job(name, make) for name, make in zip("ab", makes, strict=True)]
    report = hocket.share(jobs, mode="free", device="cpu")
    for job in report.jobs:
        assert isinstance(job.error, ConfigError)
        assert "one of jobs 'a', 'b' changed torch.set_float32_" in str(job.error)
        assert len(job.losses) == MEET
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("fails", [False, True])
def test_all_changed_settings_are_put_back(fails: bool) -> None:
    """Past bug: of two only the first was, and the job after that ended, too.

    A job that fails with them has the change as its error, and its own as the cause.
    """

    def change(i: int) -> None:
        if i == 9:
            torch.set_default_dtype(torch.float64)
            torch.backends.cudnn.enabled = False
            if fails:
                raise ZeroDivisionError

    before = read_settings()
    jobs = [hocket.Job("a", plain(change)), hocket.Job("b", plain())]
    report = hocket.share(jobs, mode="turns", device="cpu")
    text = str(report["a"].error)
    assert text.startswith("job 'a' changed torch.set_default_dtype from torch.float32")
    assert "and torch.backends.cudnn.enabled from True to False" in text
    assert read_settings() == before
    assert report["b"].error is None
    if fails:
        assert isinstance(getattr(report["a"].error, "__cause__", None), Exception)


def _other(value: Any) -> Any:
    """Another value of the same setting."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    others = {"highest": "high", torch.float32: torch.float64}
    return others.get(value, "tf32" if value == "none" else "ieee")


@pytest.mark.parametrize("number", range(len(read_settings())))
def test_every_setting_is_seen_and_put_back(number: int) -> None:
    """The change names torch's function or attribute."""
    before = read_settings()
    values = list(before)
    values[number] = _other(before[number])
    try:
        set_settings(tuple(values))
    finally:
        changes = set_settings(before)
    assert changes
    assert all(change.name.startswith("torch.") for change in changes)
    assert read_settings() == before
    assert not set_settings(before)


@pytest.mark.parametrize("text", ["its own fault", "can't allocate memory"])
def test_a_failed_job_frees_its_memory(text: str) -> None:
    """Past bug: the error's frames held the model for as long as the others ran."""
    models: list[weakref.ref[nn.Module]] = []
    alive: list[bool] = []

    def fails(job: JobContext) -> tuple[Any, Any]:
        model = nn.Linear(4, 4)
        models.append(weakref.ref(model))

        def step(i: int) -> None:
            with job.forward():
                loss = model(torch.ones(4)).sum()
            if i == 3:
                raise RuntimeError(f"DefaultCPUAllocator: {text}")
            with job.backward():
                loss.backward()

        return step, range(NUM)

    def look(i: int) -> None:
        if i == NUM - 1:
            gc.collect()
            alive.append(models[0]() is not None)

    jobs = [hocket.Job("a", fails), hocket.Job("b", plain(look))]
    report = hocket.share(jobs, mode="turns", device="cpu")
    is_memory = isinstance(report["a"].error, NoMemoryError)
    assert is_memory is ("allocate" in text)
    assert alive == [False]


@pytest.mark.parametrize("value", [torch.ones(3), {"loss": 1.0}, "1.0", (1.0,), 1j])
def test_a_step_returns_a_number(value: Any) -> None:
    """Past bug: anything else was an error at the end, which lost the whole report."""

    def make(job: JobContext) -> tuple[Any, Any]:
        step, batches = plain()(job)
        return (lambda i: (step(i), value)[1]), batches

    jobs = [hocket.Job("a", make), hocket.Job("b", plain())]
    report = hocket.share(jobs, mode="turns", device="cpu")
    assert isinstance(report["a"].error, ConfigError)
    assert "must return a number, a tensor of one element, or None" in str(
        report["a"].error
    )
    assert not report["a"].losses
    assert len(report["b"].losses) == NUM


# Without a C++ compiler, as far as that goes.
COMPILER: Final = "inductor" if shutil.which("g++") else "aot_eager"


def compiled(dropout: float, backend: str = "aot_eager") -> Make:
    """A job whose model is compiled."""

    def make(job: JobContext) -> tuple[Any, Any]:
        model = nn.Sequential(
            nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(8)
        )
        fast: Any = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with job.forward():
                loss: torch.Tensor = (fast(x) - x).square().mean()
            with job.backward():
                loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [torch.randn(4, 8)] * NUM

    return make


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(
    ("mode", "dropout", "draws", "backend"),
    [("turns", 0.2, None, COMPILER), ("budget", 0.0, False, "aot_eager")],
)
def test_a_compiled_job_is_what_it_is_alone(
    mode: str, dropout: float, draws: bool | None, backend: str
) -> None:
    """In turns with dropout; in other modes if it says that it draws nothing."""
    make = compiled(dropout, backend)
    jobs = [hocket.Job("a", make, draws=draws), hocket.Job("b", gan("b", Trained()))]
    report = hocket.share(jobs, mode=mode, num_iterations=NUM, device="cpu")
    report.check()
    assert list(report["a"].losses) == train_alone(make, NUM, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_a_compiled_job_is_refused_where_draws_are_watched() -> None:
    """Past bug: it ran eagerly while it was watched, and its numbers differed."""
    jobs = [hocket.Job("a", compiled(0.2)), hocket.Job("b", plain())]
    report = hocket.share(jobs, mode="budget", device="cpu")
    assert isinstance(report["a"].error, ConfigError)
    assert "job 'a' runs code that torch.compile has made" in str(report["a"].error)
    assert not report["a"].losses
    assert len(report["b"].losses) == NUM


def half(*, caches: bool) -> Make:
    """A job in half precision that uses each weight twice."""

    def make(job: JobContext) -> tuple[Any, Any]:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with job.forward(), torch.autocast("cpu", cache_enabled=caches):
                loss: torch.Tensor = model(model(x)).float().square().mean()
            with job.backward():
                loss.backward()
            optimizer.step()
            return loss.detach()

        return step, (torch.randn(4, 8) for _ in range(NUM))

    return make


@pytest.mark.parametrize(("mode", "caches"), [("turns", True), ("budget", False)])
def test_half_precision_is_what_it_is_alone(mode: str, caches: bool) -> None:
    """In turns with autocast's cache, and in other modes without."""
    make = half(caches=caches)
    enter = torch.autocast.__enter__
    jobs = [hocket.Job(name, make) for name in "ab"]
    report = hocket.share(jobs, mode=mode, device="cpu")
    report.check()
    assert torch.autocast.__enter__ is enter
    for job in report.jobs:
        assert list(job.losses) == train_alone(make, NUM, 0)


@pytest.mark.parametrize("draws", [None, False])
def test_the_cache_of_autocast_is_refused_outside_turns(draws: bool | None) -> None:
    """Past bug: another job emptied it, and gradients differed, silently."""

    def draws_nothing(job: JobContext) -> tuple[Any, Any]:
        step, batches = half(caches=True)(job)
        return step, list(batches)

    jobs = [hocket.Job("a", draws_nothing, draws=draws), hocket.Job("b", plain())]
    report = hocket.share(jobs, mode="budget", device="cpu")
    assert isinstance(report["a"].error, ConfigError)
    assert "'a' entered torch.autocast with its cache" in str(report["a"].error)
    assert "cache_enabled=False" in str(report["a"].error)
    assert not report["a"].losses
    assert len(report["b"].losses) == NUM
    assert not torch.is_autocast_enabled("cpu")
