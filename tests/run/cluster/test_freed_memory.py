"""What an op frees stays in the process, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hocket import env
from hocket.errors import RunError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="not glibc"
    ),
]

# Takes memory like an op that needs some tensors at once, and frees it, many times.
PROGRAM = """
import ctypes, resource
from hocket.run.cluster.freed_memory import trim_heap, keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
SIZES = [2 << 20] * 8

def work():
    places = [libc.malloc(size) for size in SIZES]
    for place, size in zip(places, SIZES):
        libc.memset(place, 1, size)
    for place in places:
        libc.free(place)

def resident_pages():
    return int(open("/proc/self/statm").read().split()[1])

kept = keep_freed_memory()
for _ in range(4):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
full = resident_pages()
trim_heap()
print(int(kept), faults, full - resident_pages())
"""
PAGES = (8 * 2 << 20) // os.sysconf("SC_PAGE_SIZE")


def outcome(**variables: str) -> list[int]:
    """Whether memory was kept, the faults of ten rounds, and what was given back."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in {variable.name for variable in env.MALLOC}
    }
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return [int(word) for word in done.stdout.split()]


def test_memory_is_taken_from_the_system_once() -> None:
    """Later rounds find their pages where earlier ones left them; the end gives back.

    Ten rounds that took all of it anew would fault on it ten times.
    """
    kept, faults, num_given = outcome()

    assert kept
    assert faults < PAGES // 10
    assert num_given > PAGES // 2


@pytest.mark.parametrize(
    "variables",
    [
        {"HOCKET_KEEP_FREED_MEMORY": "0"},
        {"MALLOC_TOP_PAD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"},
    ],
)
def test_who_has_set_malloc_up_finds_it_so(variables: dict[str, str]) -> None:
    """The switch, or any setting of glibc's own: nothing is changed."""
    kept, faults, _ = outcome(**variables)

    assert not kept
    assert faults > 5 * PAGES


def test_the_switch_is_one_or_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that could mean either is refused."""
    monkeypatch.setenv("HOCKET_KEEP_FREED_MEMORY", "maybe")
    with pytest.raises(RunError, match="KEEP_FREED_MEMORY='maybe' must be 1 or 0"):
        env.KEEP_FREED_MEMORY.switch()
