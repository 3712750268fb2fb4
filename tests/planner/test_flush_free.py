"""Orders without a flush in a plan: their steady step, their versions, the choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from hocket.errors import ShapeError
from hocket.planner.candidate import Candidate
from hocket.planner.orders import placement_of
from hocket.planner.predict import Predictor
from hocket.planner.rank import Search, rank
from hocket.planner.ranking.report import to_html
from hocket.schedules import SCHEDULES
from tests.planner.toys import MIB, cluster, work

FLUSH_FREE = {"pipedream-2bw": 1, "wpipe": 2, "wpipe-overlapped": 2}


def predictor(num_devices: int, *, latency_s: float = 0.0) -> Predictor:
    """Eight equal layers, for sixteen samples; messages have no width."""
    return Predictor(
        work(8, message_bytes=0), cluster(num_devices, latency_s=latency_s), 16
    )


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_few_microbatches_say_whether_weights_are_old(name: str) -> None:
    """They do not depend on the microbatches, nor on how many steps there are."""
    for p, v in product((2, 3, 4), (1, 2)):
        try:
            placement = placement_of(name, p, v)
        except ShapeError:
            continue
        assert (placement.delay > 0) == (name in {"pipedream", *FLUSH_FREE})
        assert (max(placement.num_versions) > 1) == (placement.delay > 0)


@pytest.mark.parametrize(("name", "v"), FLUSH_FREE.items())
def test_a_full_pipeline_has_no_bubble(name: str, v: int) -> None:
    """A step takes a device's work and no more; 1F1B fills and drains each time."""
    found = predictor(4).outcome(Candidate(name, 4, 1, v, 8))
    assert found.step_s == pytest.approx(8 * 2 * 2 * 0.03)
    assert found.bubble_fraction == pytest.approx(0.0)
    assert found.gap == pytest.approx(0.0)
    flushed = predictor(4).outcome(Candidate("1f1b", 4, 1, 1, 8))
    assert flushed.step_s > 1.3 * found.step_s


def test_a_hop_costs_what_the_formula_says() -> None:
    """Idle `1 - s / (s + 2c(D-1)/D)`, with s = F + B, and half of it for WPipe.

    Source: shared formulas of the order; exact for as many microbatches as devices.
    """
    p, c = 4, 0.006
    for name, v, s in (("pipedream-2bw", 1, 4 * 0.06), ("wpipe", 2, 4 * 0.03)):
        found = predictor(p, latency_s=c).outcome(Candidate(name, p, 1, v, p))
        assert found.bubble_fraction == pytest.approx(1 - s / (s + 2 * c * (p - 1) / p))


def test_the_longer_warm_up_hides_the_hop() -> None:
    """Up to a quarter of `F + B`."""
    found = predictor(4, latency_s=0.03).outcome(
        Candidate("wpipe-overlapped", 4, 1, 2, 8)
    )
    assert found.bubble_fraction == pytest.approx(0.0)


def test_old_weights_are_counted() -> None:
    """2BW holds all weights twice, WPipe those of the front half."""
    one = 2 * 8 * MIB  # of a device
    for name, v, copies in (("pipedream-2bw", 1, 2.0), ("wpipe", 2, 1.5)):
        found = predictor(4).outcome(Candidate(name, 4, 1, v, 4))
        assert [split.weight_bytes for split in found.memory] == [one] * 4
        assert [x.version_bytes for x in found.memory] == [one * (copies - 1)] * 4
        assert found.delay == 1


def test_gradients_that_wait_to_be_clipped_are_counted() -> None:
    """2BW: where an update waits, the next step's gradients lie beside the last's.

    Until then the weights of the last step are gone: its gradients take their place.
    The peak is in the update itself, if activations are small.
    """
    candidate = Candidate("pipedream-2bw", 4, 1, 1, 8)
    small = work(8, activation_bytes=0, message_bytes=0, update_s_per_byte=1e-9)
    soon, late = (
        Predictor(small, cluster(4), 16, clips=clips).outcome(candidate)
        for clips in (False, True)
    )
    more = [
        other.total_bytes - one.total_bytes
        for one, other in zip(soon.memory, late.memory, strict=True)
    ]
    work_bytes = 2 * MIB  # of a backward, which no longer is at the peak
    gradients = soon.memory[3].gradient_bytes
    assert more == [0, *[gradients - work_bytes] * 3]


def test_none_is_chosen_unless_the_user_allows_it() -> None:
    """Though it is the fastest by far, and in the table."""
    asked = Search(("1f1b", "wpipe"), num_devices=(4,), data_parallel=False)
    kept = rank(work(8), cluster(4), 16, asked)
    assert kept.best is not None
    assert kept.best.delay == 0
    assert kept.outcomes[0].delay == 1
    allowed = rank(work(8), cluster(4), 16, replace(asked, max_delay=1))
    assert allowed.best is not None
    assert allowed.best.candidate.schedule == "wpipe"


def old_weights(text: str) -> dict[str, list[str]]:
    """The rows below `* old weights`, by the order's name."""
    lines = iter(text.splitlines())
    next(line for line in lines if line.startswith("* old weights"))
    rows = (line.split("  ") for line in lines)
    found = {}
    for row in rows:
        words = [word.strip() for word in row if word.strip()]
        if not words:
            break
        found[words[0]] = words[1:]
    return found


def test_every_such_candidate_is_shown_with_what_it_keeps() -> None:
    """Delay, versions and their bytes: 2BW twice all weights, WPipe 1.5 times."""
    asked = Search(
        ("pipedream-2bw", "wpipe"),
        num_devices=(4,),
        num_microbatches=(4,),
        recompute=(False,),
        data_parallel=False,
        max_delay=1,
    )
    ranking = rank(work(8), cluster(4), 16, asked)
    rows = old_weights(str(ranking))

    assert rows["pipedream-2bw"][-5:] == ["1", "2 x 4", "16", "16", "2.00"]
    assert rows["wpipe"][-5:] == ["1", "2 x 4, 1 x 4", "16", "8", "1.50"]
    page = to_html(ranking)
    assert "the ones with old weights" in page
    assert "2 x 4, 1 x 4" in page


def test_what_does_not_fit_is_shown_too() -> None:
    """With the versions that are too much."""
    asked = Search(("pipedream-2bw",), num_devices=(4,), data_parallel=False)
    ranking = rank(work(8), cluster(4, memory_bytes=60 * MIB), 16, asked)

    assert not ranking.fitting
    assert old_weights(str(ranking))["pipedream-2bw"][-4] == "2 x 4"
