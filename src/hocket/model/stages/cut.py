"""Cut a captured model into stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import fx, nn
from torch.utils._pytree import TreeSpec

from hocket.errors import ModelError
from hocket.model.capture.captured import Captured
from hocket.model.capture.sequential import has_hooks, prefixes
from hocket.model.stages.emit import emit
from hocket.model.stages.layer_seeds import drawing_seeds
from hocket.model.stages.parameter_paths import give_homes, take_tensors
from hocket.model.stages.part import Part, part_of
from hocket.model.stages.routes import Flows, Routes, chain, routes
from hocket.model.stages.stage import StageModule as StageModule
from hocket.model.trace.flow import TraceFlow
from hocket.model.trace.layers import first_positions
from hocket.model.trace.trace import CallSpan
from hocket.model.trace.value import SentTensor
from hocket.nearest import nearest


def cut(
    captured: Captured,
    boundaries: Sequence[int],
    flows: Flows | None = None,
    only: Collection[int] | None = None,
) -> tuple[StageModule, ...]:
    """Cut a model before the given layers.

        layers       0  1  2 | 3  4 | 5        boundaries (3, 5): three stages

    Args:
        captured: the model.
        boundaries: the layers at which stages 1, 2, ... begin.
        flows: `(from_stage, to_stage)`: the pairs of stages between which values go;
            from each stage to the next when not given. A value goes directly where
            there is such a flow, and is relayed where there is none.
        only: the numbers of the stages to make; all when not given.

    Raises:
        ModelError: the boundaries do not increase strictly, or are no layers; no path
            of flows leads to a stage that reads a value; or parameters were frozen or
            unfrozen since the capture.
    """
    if not captured.is_current:
        raise ModelError(
            "requires_grad of some parameters changed after the model was captured, "
            "and with it what has to be sent back: capture it again"
        )
    num_layers = len(captured.layers)
    edges = (0, *boundaries, num_layers)
    pairs = list(pairwise(edges))
    if any(end <= begin for begin, end in pairs):
        raise ModelError(
            f"boundaries must increase strictly and lie between 1 and "
            f"{num_layers - 1}, because the model has {num_layers} layers; got "
            f"{tuple(boundaries)}"
        )
    found = routes(
        captured, edges[:-1], tuple(chain(len(pairs))) if flows is None else flows
    )
    return tuple(
        _stage(captured, found, index, begin, end)
        for index, (begin, end) in enumerate(pairs)
        if only is None or index in only
    )


def names_in_stages(
    captured: Captured, boundaries: Sequence[int]
) -> tuple[frozenset[str], ...]:
    """Return the first names of what each stage of a cut uses, without cutting.

    Args:
        captured: the model.
        boundaries: the layers at which stages 1, 2, ... begin.
    """
    edges = (0, *boundaries, len(captured.layers))
    return tuple(
        _names(captured, _parts(captured, begin, end), begin, end)
        for begin, end in pairwise(edges)
    )


def check_as_is(
    captured: Captured, boundaries: Sequence[int], flows: Flows | None = None
) -> None:
    """Refuse a cut through a module that must run as it is.

    Args:
        captured: the model; `as_is` has the paths of these modules.
        boundaries: the layers at which stages 1, 2, ... begin.
        flows: as for `cut`.

    Raises:
        ModelError: names the module.
    """
    if not captured.as_is:
        return
    edges = (0, *boundaries, len(captured.layers))
    pairs = list(pairwise(edges))
    given = tuple(chain(len(pairs))) if flows is None else flows
    received = routes(captured, edges[:-1], given).received
    covered: dict[bool, set[str]] = {True: set(), False: set()}
    for stage, (begin, end) in enumerate(pairs):
        before = [x for nodes in received[stage].values() for x in nodes]
        for mode, part in _parts(captured, begin, end, before).items():
            covered[mode] |= {span.key for span in part.spans.values()}
    for mode, flow in ((True, captured.training), (False, captured.evaluation)):
        for key, span in flow.trace.spans.items():
            if span.path in captured.as_is and not (
                covered[mode].intersection((key, *span.around))
                or flow.trace.runs_as_is(key)
                or _does_nothing(captured, flow, span)
            ):
                raise AsIsError(span.path, captured.as_is[span.path], len(pairs))


class AsIsError(ModelError):
    """No stage can run a module as it is.

    Args:
        path: the module's path in the model.
        why: why it must run as it is.
        num_stages: the number of stages.
    """

    def __init__(self, path: str, why: str, num_stages: int) -> None:
        what = f"the module {path}" if path else "the model's own forward"
        super().__init__(
            f"{what} is cut apart between {num_stages} stages, or its arguments are "
            f"not known, and it must run as it is: {why}. Cut elsewhere (cut=[...], or "
            "fewer stages), or move what is special about it into a submodule"
        )


def _does_nothing(captured: Captured, flow: TraceFlow, span: CallSpan) -> bool:
    """Return whether a module returns its argument, and does nothing else."""
    module, path = captured.model.get_submodule(span.path), span.path
    is_identity = set(span.out.values()) <= set(span.given)
    is_torchs = type(module).__module__.startswith("torch.nn.modules.")
    # What it does in training alone; not what has changed since it was captured.
    why = captured.as_is[path], captured.training.trace.as_is.get(path)
    is_training = why[0] == why[1] and path not in flow.trace.as_is
    return is_identity and (is_torchs or is_training) and not has_hooks(module)


def boundaries_from_names(captured: Captured, names: Sequence[str]) -> tuple[int, ...]:
    """Return the boundaries at which the named modules begin.

    Args:
        captured: the model.
        names: one module (or layer) per stage but the first, in order.

    Raises:
        ModelError: a name at which the model cannot be cut; lists the nearest that can.
    """
    known: dict[str, int] = {}
    for index, layer in enumerate(captured.layers):
        for name in (*layer.modules, layer.name):
            known.setdefault(name, index)
    cuts = {name: index for name, index in known.items() if index}
    found = []
    for name in names:
        if name not in cuts:
            raise ModelError(_unknown(captured, name, known, list(cuts)))
        found.append(cuts[name])
    for (a, first), (b, second) in pairwise(zip(names, found, strict=True)):
        if first >= second:
            why = (
                ": what is between them runs in training alone, or in evaluation, or "
                "gives no tensor of a known shape; name other modules (cut=[...], or "
                'layers="..." of freeze=)'
            )
            raise ModelError(
                "cut points must follow the order of the model, each at another layer: "
                f"{a} is the layer {first}, and {b} is the layer {second}"
                f"{why if first == second else ''}"
            )
    return tuple(found)


def shared_parameters(stages: Sequence[StageModule]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages use: their gradients are summed.

    Args:
        stages: the stages of one model.

    Returns:
        The stages that use each, by the parameter's first name in the uncut model.
    """
    users: dict[str, tuple[int, ...]] = {}
    for stage in stages:
        for name, _ in stage.named_parameters():
            users[name] = (*users.get(name, ()), stage.index)
    return {name: found for name, found in users.items() if len(found) > 1}


def num_frozen_stages(stages: Sequence[StageModule]) -> int:
    """Count the stages at the front that have nothing to train, in or before them.

    The last stage is never among them: without it nothing would be trained at all.

    Args:
        stages: the stages of one model.
    """
    for number, stage in enumerate(stages):
        trains = any(parameter.requires_grad for parameter in stage.parameters())
        if trains or any(value.requires_grad for value in stage.outputs):
            return number
    return len(stages) - 1


def _unknown(
    captured: Captured, name: str, known: Mapping[str, int], cuts: list[str]
) -> str:
    if name in known:
        return f"the model begins with {name}, so it cannot be cut before it"
    nearby = nearest(name, cuts)
    if name not in dict(captured.model.named_modules()):
        return f"{name} is no module of the model; {nearby}"
    trace = captured.training.trace
    whole = {trace.path_of(x) for x in trace.calls if x.op == "call_module"}
    outer = [path for path in prefixes(name)[:-1] if path in whole]
    if outer:
        return f"{name} is inside {outer[0]}, which runs as it is; {nearby}"
    if first_positions(captured.training).get(name) in captured.places:
        return f"no layer begins with {name}: capture with cut=[{name!r}]; {nearby}"
    return (
        f"{name} is no place to cut at: it is not called, or what crosses there is no "
        f"tensor of a known shape, or is changed later; {nearby}"
    )


def _stage(
    captured: Captured, found: Routes, index: int, begin: int, end: int
) -> StageModule:
    num_stages = len(found.sent)
    is_last = index == num_stages - 1
    before = tuple(x for nodes in found.received[index].values() for x in nodes)
    parts = _parts(captured, begin, end, before)
    sent = {x for nodes in found.sent[index].values() for x in nodes}
    after = tuple(node for node in captured.values if node in sent)
    received = _values_along(captured, found.received[index])
    inputs = tuple(captured.values[node] for node in before)
    leaves = sorted(parts[True].leaves | parts[False].leaves)
    size_at = _size_at(captured, inputs, leaves)
    lengths = sorted({place for part in parts.values() for place in part.lengths})
    leaves = sorted({*leaves, *(leaf for leaf, _ in lengths)})
    needs_size = any(part.uses_num_samples for part in parts.values())
    reads_nothing = not (inputs or leaves)  # parameters alone: where is its device?
    if size_at is None and (needs_size or reads_nothing):
        leaves = sorted({*leaves, captured.example.batched.index(True)})
        size_at = _size_at(captured, inputs, leaves)
    modules = _modules(captured, parts)
    modules |= captured.beside if is_last else {}
    draws = _draws(captured, parts[True])
    drawing = _drawing(parts[True])
    state = captured.state
    changing = captured.training.changed.union(*map(state.below, captured.as_is))
    buffers = (x for x in state.tensors if not state.is_parameter(x))
    stage = StageModule(
        index=index,
        num_stages=num_stages,
        batch_inputs=tuple(leaves),
        received=received,
        sent=_values_along(captured, found.sent[index]),
        outputs=tuple(captured.values[node] for node in after),
        random_layers=(*draws.values(), *drawing),
        right_for=captured.right_for,
        size_at=size_at,
        lengths_at=tuple((len(inputs) + leaves.index(i), dim) for i, dim in lengths),
        rebuild=_rebuild(captured) if is_last else {},
        fixed_buffers=frozenset(buffers) - changing,
        runs_backward=any(
            facts.runs_backward
            for node, facts in captured.training.facts.items()
            if node in parts[True].body
        ),
    )
    stage.layer_seeds.draws_numbers = bool(drawing)
    code = {}
    for mode, part in parts.items():
        title = f"stage {index} of {num_stages}, {'training' if mode else 'evaluation'}"
        code[mode] = emit(
            part,
            _in_mode(captured, before, mode),
            leaves,
            _in_mode(captured, after, mode),
            title,
            draws if mode else {},
            stage.layer_seeds,
            captured.model,
            lengths,
        )
    names = _names(captured, parts, begin, end)
    homes = give_homes(stage, captured.state, names, modules)
    for path in captured.beside if is_last else ():
        take_tensors(stage, path, captured.state)
    stage.set_code(code, homes)
    stage.training = captured.model.training
    return stage


def _rebuild(captured: Captured) -> dict[bool, Callable[[Any], Any]]:
    """Return functions that rebuild the model's output, for modes with a structure.

    A detector returns losses in training and boxes in evaluation; an Inception network
    a tuple in training and a tensor in evaluation.
    """
    flows = {True: captured.training, False: captured.evaluation}
    specs = {mode: flow.trace.out_spec for mode, flow in flows.items()}
    return {mode: _unflatten(x) for mode, x in specs.items() if not x.is_leaf()}


def _unflatten(spec: TreeSpec) -> Callable[[Any], Any]:
    """Return a function, which a copy of the stage shares: torch copies no spec."""
    return lambda leaves: spec.unflatten(leaves)


def _parts(
    captured: Captured, begin: int, end: int, received: Sequence[fx.Node] = ()
) -> dict[bool, Part]:
    flows = {True: captured.training, False: captured.evaluation}
    parts = {}
    for mode, flow in flows.items():
        starts = [pair[0 if mode else 1] for pair in captured.starts]
        edges = (*starts, len(flow.compute))
        before = _in_mode(captured, received, mode)
        part = part_of(flow, edges[begin], edges[end], before, captured.as_is)
        parts[mode] = part
    return parts


def _values_along(
    captured: Captured, flows: Mapping[int, Sequence[fx.Node]]
) -> dict[int, tuple[SentTensor, ...]]:
    return {
        stage: tuple(captured.values[node] for node in nodes)
        for stage, nodes in flows.items()
    }


def _in_mode(
    captured: Captured, nodes: Sequence[fx.Node], mode: bool
) -> Sequence[fx.Node]:
    """Return the calls of one mode that match these calls of training."""
    return nodes if mode else [captured.partner_of[node] for node in nodes]


def _size_at(
    captured: Captured, inputs: Sequence[SentTensor], leaves: Sequence[int]
) -> tuple[int, int] | None:
    """Return which argument of the stage has the number of samples."""
    size = captured.example.num_samples
    for place, value in enumerate(inputs):
        for dim, (length, growth) in enumerate(
            zip(value.shape, value.per_sample, strict=True)
        ):
            if length == size and growth == 1:
                return place, dim
    for place, leaf in enumerate(leaves):
        if captured.example.batched[leaf]:
            return len(inputs) + place, 0
    return None


def _draws(captured: Captured, part: Part) -> dict[fx.Node, int]:
    """Return the calls before which random numbers are seeded, and their numbers.

    These are the first to draw in each layer, with the layer's number, and the first to
    draw behind any other place to cut at: what is drawn does not depend on the cut.
    """
    starts, places = captured.own_starts, sorted(captured.places)
    found: dict[fx.Node, int] = {}
    layers, pieces = set[int](), set[int]()
    for position, node in enumerate(captured.training.compute):
        if not captured.training.facts[node].is_random:
            continue
        layer = bisect_right(starts, position) - 1
        piece = bisect_right(places, position)
        if layer not in layers:
            found[node] = layer
        elif piece not in pieces:
            found[node] = len(starts) + position
        layers.add(layer)
        pieces.add(piece)
    own = {*part.body, *part.inside}
    return {node: number for node, number in found.items() if node in own}


def _drawing(part: Part) -> list[int]:
    """Return the seeds of the modules that draw Python's random numbers."""
    trace = part.flow.trace
    seeds = (drawing_seeds(trace, span.key) for span in part.spans.values())
    return [number for found in seeds for number in found.values()]


def _names(
    captured: Captured, parts: Mapping[bool, Part], begin: int, end: int
) -> frozenset[str]:
    """Return the first names of all of the stage's parameters and buffers."""
    layers = captured.layers[begin:end]
    names = {x for layer in layers for x in (*layer.parameters, *layer.buffers)}
    for part in parts.values():
        for node in (*part.body, *part.kept):
            names.update(part.flow.trace.reads(node))
        for span in part.spans.values():
            names.update(captured.state.below(span.path))
    return frozenset(names)


def _modules(captured: Captured, parts: Mapping[bool, Part]) -> dict[str, nn.Module]:
    """Return the modules that the stage runs as they are, by path, outermost first."""
    found: dict[str, Any] = {}
    for part in parts.values():
        for span in part.spans.values():
            found[span.path] = captured.model.get_submodule(span.path)
        for node in part.body:
            if node.op == "call_module" and node not in part.spans:
                trace = part.flow.trace
                found[trace.path_of(node)] = trace.objects[str(node.target)]
    return dict(sorted(found.items(), key=lambda item: len(prefixes(item[0]))))
