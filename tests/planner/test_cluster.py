"""Where messages and rings cross from node to node, and what they share there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.core.costs import Link
from hocket.errors import PlanError
from hocket.planner.candidate import Candidate
from hocket.planner.cluster import MessageCosts
from hocket.planner.predict import Predictor
from tests.planner.toys import cluster, work


def test_a_pipeline_inside_a_node_never_leaves_it() -> None:
    """Two replicas of four, a node each: only their rings cross."""
    two_nodes = cluster(8, num_nodes=2, network_bytes_per_s=1e9)
    assert two_nodes.pipeline_links(4, 2) == ()
    assert two_nodes.reduce_link(4, 2).bytes_per_s == 1e9 / 4  # four rings at once


def test_a_pipeline_over_nodes_crosses_once_each_way() -> None:
    """From device 3 to 4, and from the last to the first one."""
    two_nodes = cluster(8, num_nodes=2, network_bytes_per_s=1e9)
    links = {(a, b): link for a, b, link in two_nodes.pipeline_links(8, 1)}
    assert set(links) == {(3, 4), (4, 3), (7, 0), (0, 7)}
    assert all(link.bytes_per_s == 1e9 for link in links.values())


def test_the_usual_hop_is_inside_a_node_if_it_has_two_devices() -> None:
    """With one device per node, every hop is over the network."""
    network = 1e9
    assert cluster(8, num_nodes=8, network_bytes_per_s=network).hop == Link(0, network)
    several = cluster(8, num_nodes=4, network_bytes_per_s=network)
    assert several.hop == several.inside == cluster(8).hop


def test_replicas_that_cross_together_share_the_card() -> None:
    """Pipelines of 2 in nodes of 3: the second of three has one device in each."""
    nodes = cluster(6, num_nodes=2, network_bytes_per_s=1e9)
    links = {(a, b): link for a, b, link in nodes.pipeline_links(2, 3)}
    assert set(links) == {(0, 1), (1, 0)}
    assert links[0, 1].bytes_per_s == 1e9


def test_data_parallelism_over_nodes_is_one_ring() -> None:
    """It leaves each node once, so it has the card to itself."""
    nodes = cluster(8, num_nodes=2, network_bytes_per_s=1e9)
    assert nodes.reduce_link(1, 8).bytes_per_s == 1e9
    assert cluster(8).reduce_link(1, 8).bytes_per_s == 1e11


@pytest.mark.parametrize(("num_devices", "num_nodes"), [(0, 1), (4, 3), (4, 0)])
def test_nodes_have_equally_many_devices(num_devices: int, num_nodes: int) -> None:
    """Anything else is refused, with the numbers."""
    with pytest.raises(PlanError, match=str(num_devices)):
        cluster(num_devices, num_nodes=num_nodes)


def test_measured_messages_take_the_place_of_usual_ones() -> None:
    """Orders are simulated with them; the cut stays that of the usual link."""
    usual = cluster(2, bytes_per_s=1e6)
    slow = MessageCosts(Link(0.5, 1e3), Link(0.25))
    measured = replace(usual, messages=slow)
    candidate = Candidate("1f1b", 2, 1, 1, 4)
    before, found = (
        Predictor(work(8), x, 8).outcome(candidate) for x in (usual, measured)
    )
    costs = Predictor(work(8), measured, 8).costs(candidate)
    assert (costs.link, costs.handling) == (slow.link, slow.handling)
    assert found.boundaries == before.boundaries
    assert found.step_s > before.step_s


def test_shards_are_neighbours_and_replicas_are_not() -> None:
    """2x2x2 in two nodes: rings of shards stay inside; those of replicas leave.

    rank    0  1 | 2  3 || 4  5 | 6  7      node 0 || node 1
    """
    two = cluster(8, num_nodes=2, network_bytes_per_s=1e9, bytes_per_s=1e11)
    assert two.shard_link(2).bytes_per_s == 1e11
    assert two.reduce_link(2 * 2, 2).bytes_per_s == 1e9 / 4
    assert two.pipeline_links(2, 2, 2) == ()


def test_shards_of_a_stage_that_fills_a_node_send_side_by_side() -> None:
    """2x1x4 in two nodes: each of four shards sends its own messages over the card."""
    two = cluster(8, num_nodes=2, network_bytes_per_s=1e9, bytes_per_s=1e11)
    assert {link.bytes_per_s for *_, link in two.pipeline_links(2, 1, 4)} == {1e9 / 4}
    assert two.shard_link(4).bytes_per_s == 1e11
    assert two.shard_link(8).bytes_per_s == 1e9
