"""Write the networks that `hocket plan NAME` knows, as packaged data of hocket.

python -m bench.networks.write
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from bench.networks.resnext import resnext
from bench.networks.transformers import bert, deep_bert, dense, gpt3_medium, recurrent
from bench.published import PACKAGED
from hocket.planner.published.catalogue import CountedLayer, Product

HEAD: Final = """# The networks that `hocket plan NAME` knows, as published; written by
# bench/networks/write.py.
#
# batch_size  samples per step, as in the experiment: of WPipe's 32 per device
# groups      layers that follow each other `times` times, numbered from `first`
# products    of each layer: rows, inner, columns (see catalogue.py)
"""


@dataclass(frozen=True, slots=True)
class Published:
    """A network of a published experiment.

    Args:
        layers: its layers, in order.
        batch_size: samples per step, as in the experiment.
        summary: what it is.
    """

    layers: tuple[CountedLayer, ...]
    batch_size: int
    summary: str


def networks() -> dict[str, Published]:
    """Return all networks by name. Pre-trained BERTs score 20 masked words."""
    found: dict[str, Published] = {}
    for blocks in (12, 24, 36, 48):
        found[f"bert-{blocks}"] = Published(
            bert(blocks, num_scored=0), 96, f"BERT, {blocks} blocks, two classes"
        )
    for blocks, samples in ((12, 480), (24, 320), (36, 380), (48, 320)):
        found[f"bert-{blocks}-pretraining"] = Published(
            bert(blocks, num_scored=20),
            samples,
            f"BERT, {blocks} blocks, 20 masked words",
        )
    for blocks, samples in ((96, 256), (192, 256), (384, 2048), (768, 2048)):
        found[f"deep-bert-{blocks}"] = Published(
            deep_bert(blocks), samples, f"BERT-base with {blocks} blocks"
        )
    for depth, width, samples in (
        *((50, 4, 256), (101, 8, 256), (200, 4, 256), (302, 4, 256)),
        *((500, 4, 2048), (800, 4, 2048)),
    ):
        found[f"resnext-{depth}"] = Published(
            resnext(depth, group_width=width),
            samples,
            f"ResNeXt-{depth} 32x{width}d, 224 x 224 pixels",
        )
    found["gpt3-medium"] = Published(
        gpt3_medium(512), 32, "GPT-3 Medium, 24 blocks, 512 tokens"
    )
    found["rnn-16"] = Published(
        recurrent(16, 1024, 64), 256, "LSTM, 16 layers, 64 tokens"
    )
    found["ffnn-16"] = Published(dense(16, 4096), 4096, "16 layers of width 4096")
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that follow each other several times, with `{}` for the number."""

    layers: tuple[CountedLayer, ...]
    first: int
    times: int = 1


def groups(layers: Iterable[CountedLayer]) -> list[Group]:
    """Join layers that differ in nothing but the numbers in their names."""
    found: list[Group] = []
    numbered = [_numbered(layer) for layer in layers]
    for number, same in groupby(numbered, key=lambda pair: pair[0]):
        group = Group(tuple(layer for _, layer in same), max(0, number))
        last = found[-1] if found else None
        if (
            last is not None
            and last.layers == group.layers
            and last.first + last.times == number
        ):
            found[-1] = replace(last, times=last.times + 1)
        else:
            found.append(group)
    return found


def _numbered(layer: CountedLayer) -> tuple[int, CountedLayer]:
    """Return the number in a layer's name, or -1; and the layer with `{}` for it."""
    found = re.fullmatch(r"(.*?)(\d+)(\.[a-z]+)?", layer.name)
    if found is None:
        return -1, layer
    name = f"{found[1]}{{}}{found[3] or ''}"
    return int(found[2]), replace(layer, name=name)


def text_of(published: dict[str, Published]) -> str:
    """Return the networks as TOML."""
    return "\n".join([HEAD.rstrip(), *_lines(published)]) + "\n"


def _lines(published: dict[str, Published]) -> Iterator[str]:
    for name, network in published.items():
        yield from ("", f"[{name}]", f"batch_size = {network.batch_size}")
        yield f'summary = "{network.summary}"'
        for group in groups(network.layers):
            yield from ("", f"[[{name}.groups]]", f"first = {group.first}")
            yield from (f"times = {group.times}", "layers = [")
            yield from (f"    {{{_entry(layer)}}}," for layer in group.layers)
            yield "]"


def _entry(layer: CountedLayer) -> str:
    products = ", ".join(map(_product, layer.products))
    numbers = {
        "other_floats": layer.other_floats,
        "kept_floats": layer.kept_floats,
        "received_floats": layer.received_floats,
        "num_weights": layer.num_weights,
        "num_states": layer.num_states,
    }
    more = ", ".join(f"{key} = {value}" for key, value in numbers.items())
    return f'name = "{layer.name}", products = [{products}], {more}'


def _product(product: Product) -> str:
    """Return a product's numbers, without those at the end that are usual."""
    numbers = [product.rows, product.inner, product.columns]
    text = ", ".join(map(str, numbers))
    has_weights = str(product.has_weights).lower()
    if product.num_times != 1:
        return f"[{text}, {has_weights}, {product.num_times}]"
    return f"[{text}]" if product.has_weights else f"[{text}, {has_weights}]"


if __name__ == "__main__":
    (PACKAGED / "networks.toml").write_text(text_of(networks()), encoding="utf-8")
