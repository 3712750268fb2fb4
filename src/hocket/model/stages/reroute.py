"""Replaces some operators on a stage's weights by functions of ours.

An operator is replaced only where every use of its weight in the stage is a call that
has a route. So a parameter's gradient comes from replaced calls only, or from other
calls only, never from both:

    linear(x, w)    embedding(w, i)           both are routed
    linear(x, v)    norm(v)                   neither is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import fx
from torch.utils._pytree import tree_leaves

from hocket.model.stages.emit import Code, compile_graph
from hocket.model.stages.stage import StageModule


@dataclass(frozen=True, slots=True)
class Route:
    """The function that replaces an operator.

    Args:
        function: takes the operator's own arguments.
        weight: the weight's place among them.
        bias: the bias's place, for operators that have one.
    """

    function: Callable[..., Any]
    weight: int
    bias: int | None = None


Routes: TypeAlias = Mapping[Any, Route]


def runs_modules(stage: StageModule) -> bool:
    """Return whether it runs some modules as they are, whose calls have no routes."""
    nodes = stage.training_code.graph.nodes
    return any(node.op == "call_module" for node in nodes)


def rerouted(stage: StageModule, routes: Routes) -> StageModule:
    """Return the stage for training that calls these functions; the state is shared.

    Args:
        stage: a stage without modules that are run as they are.
        routes: the routes, by the operator as the stage calls it.
    """
    code = stage.training_code
    graph = deepcopy(code.graph)
    for node in _taken(graph, len(code.state), routes):
        node.target = routes[node.target].function
    title = f"{code.title}, rerouted"
    changed: Code = replace(code, function=compile_graph(graph, title), graph=graph)
    return stage.with_training_code(changed)


def _taken(graph: fx.Graph, num_state: int, routes: Routes) -> list[fx.Node]:
    """Return the calls whose weights are used by such calls alone."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    state = frozenset(placeholders[1 : 1 + num_state])  # behind the device
    taken = {
        node: found
        for node in graph.nodes
        if node.op == "call_function"
        and node.target in routes
        and (found := _parameters(node, routes[node.target], state))
    }
    while True:
        wrong = [
            node
            for node, parameters in taken.items()
            if not all(_is_only_in(x, taken) for x in parameters)
        ]
        if not wrong:
            return list(taken)
        for node in wrong:
            del taken[node]


def _parameters(
    node: fx.Node, route: Route, state: frozenset[fx.Node]
) -> tuple[fx.Node, ...]:
    """Return a call's weight and bias; nothing if its weight is no parameter."""
    weight = _argument(node, route.weight, "weight")
    bias = None if route.bias is None else _argument(node, route.bias, "bias")
    if weight not in state:
        return ()
    return tuple(x for x in (weight, bias) if isinstance(x, fx.Node) and x in state)


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _is_only_in(
    parameter: fx.Node, taken: Mapping[fx.Node, tuple[fx.Node, ...]]
) -> bool:
    """Return whether all its uses are calls in `taken`, as their weight or bias."""
    return all(
        user in taken and _count(user, parameter) == taken[user].count(parameter)
        for user in parameter.users
    )


def _count(node: fx.Node, argument: fx.Node) -> int:
    """Count how often a call has this argument."""
    given = tree_leaves((node.args, node.kwargs))
    return sum(x is argument for x in given)
