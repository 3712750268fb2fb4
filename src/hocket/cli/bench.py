"""`hocket bench`: published experiments, simulated and measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Annotated, Any, Final

import typer

from hocket.cli.shared.options import JsonOption
from hocket.cli.shared.output import folded, num_columns, sentence
from hocket.planner.published.catalogue import read_results

_COLUMNS: Final = 100  # of a legend, at most


def bench_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="ooo-pipeline, ooo-single, ooo-data, wpipe, tspipe, pipetransformer.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show a published experiment, simulated and measured, beside its source.

    ooo-pipeline: BERT, GPT-3 Medium, an RNN and an FFNN on 4 to 32 V100s, simulated,
    by out-of-order backprop and by all other schedules, beside GPipe; and BERT
    fine-tuned on MRPC by two CPU workers, measured.

    ooo-single: DenseNet-121 and MobileNetV3 on one V100, estimated: launched kernel by
    kernel, in one graph, and with weight gradients in a second lane.

    ooo-data: ResNet-50 and -101 on 1 to 12 hosts of four V100s, simulated, by reverse
    first-k beside data parallelism; and two hosts with a slow link, measured.

    wpipe: BERT and ResNeXt by depth on 8 and 64 V100s, simulated, by WPipe, 2BW, 1F1B
    and data parallelism; and BERT fine-tuned on MRPC by two CPU workers, measured.

    tspipe: ViTs, ResNets and BERTs with their teachers on 8 and 16 V100s, simulated, by
    model parallelism, GPipe, TSPipe, filled orders and data parallelism; and two
    transformers on two CPU workers, measured.

    pipetransformer: ViT-B/16 and BERT-large, whose layers freeze, on 16 Quadro RTX
    5000, simulated, by PipeTransformer's modules and by hocket; DDP beside pipelines on
    three and four of them; and ten epochs of two small models on two CPU workers,
    measured.

    The scripts in bench/ of hocket's repository simulate and measure them again.
    """
    results = read_results(name)
    tables = results.pop("tables")
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    width = num_columns()
    pages = ("\n".join(_lines(table, width)) for table in tables)
    typer.echo("\n\n".join(pages))


def _lines(table: Mapping[str, Any], width: int) -> Iterator[str]:
    for line in table["title"]:
        yield from sentence(line)
    yield ""
    yield from (line.rstrip() for line in folded(table["rows"], width))
    yield ""
    width = min(width, _COLUMNS)
    yield from wrap(table["legend"], width, break_on_hyphens=False)
