"""The plan of moves: everything needed arrives, once, from a worker that has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import ModelError
from hocket.run.nets.net import holders_of, plan_moves

KEYS = [("net", name) for name in "abcdef"]
ranks = st.frozensets(st.integers(0, 4), max_size=4)
some = st.frozensets(st.integers(0, 4), min_size=1, max_size=4)


@given(
    before=st.fixed_dictionaries(dict.fromkeys(KEYS, some)),
    after=st.fixed_dictionaries(dict.fromkeys(KEYS, ranks)),
)
def test_each_worker_gets_what_it_lacks_and_nothing_else(
    before: dict[tuple[str, str], frozenset[int]],
    after: dict[tuple[str, str], frozenset[int]],
) -> None:
    """Once, from one that holds it; and the plan does not depend on dict order."""
    sizes = {key: i + 1 for i, key in enumerate(KEYS)}
    moves = plan_moves(before, after, sizes)

    got = [(m.net, m.name, target) for m in moves for target in m.targets]
    lacked = [(*key, rank) for key in KEYS for rank in after[key] - before[key]]
    assert sorted(got) == sorted(lacked)
    assert all(move.source in before[move.net, move.name] for move in moves)
    turned, others = (dict(reversed(x.items())) for x in (before, after))
    assert plan_moves(turned, others, sizes) == moves


def test_the_sender_of_the_fewest_bytes_sends() -> None:
    """Two replicas hold all; each sends half to a third."""
    before = {key: frozenset({0, 1}) for key in KEYS[:4]}
    after = {key: frozenset({2}) for key in KEYS[:4]}
    moves = plan_moves(before, after, dict.fromkeys(KEYS, 8))
    assert [move.source for move in moves] == [0, 1, 0, 1]


def test_a_worker_on_the_same_host_sends() -> None:
    """Rank 0 to rank 1 on one host, and rank 2, which holds it too, to rank 3."""
    before = {key: frozenset({0, 2}) for key in KEYS[:2]}
    after = {key: frozenset({1, 3}) for key in KEYS[:2]}
    moves = plan_moves(before, after, dict.fromkeys(KEYS, 8), ["a", "a", "b", "b"])
    assert [(m.source, m.targets) for m in moves] == [(0, (1,)), (2, (3,))] * 2
    [last] = plan_moves(
        {KEYS[0]: frozenset({0})}, {KEYS[0]: frozenset({3})}, {KEYS[0]: 8}, [*"aabb"]
    )
    assert (last.source, last.targets) == (0, (3,))


def test_what_no_worker_holds_is_refused() -> None:
    """Named, with how many more there are."""
    with pytest.raises(ModelError, match=r"no worker holds a of net net \(and 1 more"):
        plan_moves({}, {key: frozenset({0}) for key in KEYS[:2]}, {})


def test_a_tied_weight_is_held_by_all_of_its_stages() -> None:
    """On the workers of every replica."""
    names = [{"embed", "x"}, {"embed", "y"}]
    assert holders_of("net", names, [{0, 2}, {1, 3}]) == {
        ("net", "embed"): {0, 1, 2, 3},
        ("net", "x"): {0, 2},
        ("net", "y"): {1, 3},
    }
