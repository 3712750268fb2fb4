"""Write and read costs as JSON, for run folders and `hocket simulate --costs`.

{"hocket_costs": 1,
 "stages": [{"forward_s": 0.01, ...}, ...],      the fields of `StageCost`
 "links": [[0, 1, {"latency_s": ..., "bytes_per_s": null, "name": ""}], ...],
 "link": {...}, "reduce_link": {...}, "handling": {...},     null: no limit
 "shard_link": {...},                                        where stages are sharded
 "op_s": 0.0, "jitter": 0.0, "lane_capacity": 1.0, ...}      as in `Costs`
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from math import inf, isfinite
from typing import Any, Final

from hocket.core.costs import Costs, Link, StageCost
from hocket.core.formats.documents import read_json
from hocket.errors import CostsError, ParseError

VERSION: Final = 1
_PLAIN: Final = ("is_device_share", "op_s", "jitter", "lane_capacity", "accumulates")
_LINKS: Final = ("link", "reduce_link", "handling")
_SHARD_LINK: Final = "shard_link"  # is not in all files


def to_json(costs: Costs) -> str:
    """Write costs as text that `from_json` reads back to equal ones."""
    document = {
        "hocket_costs": VERSION,
        "stages": [asdict(stage) for stage in costs.stages],
        "links": [[a, b, _link_json(link)] for a, b, link in costs.links],
        **{name: _link_json(getattr(costs, name)) for name in _LINKS},
        **{name: getattr(costs, name) for name in _PLAIN},
    }
    if costs.shard_link is not None:
        document[_SHARD_LINK] = _link_json(costs.shard_link)
    return json.dumps(document, allow_nan=False, indent=1)


def from_json(text: str, *, path: str = "<json>") -> Costs:
    """Read costs; `path` is named in errors.

    Raises:
        ParseError: with the path, and what is wrong.
    """
    try:
        document = read_json(text)
    except ValueError as error:
        raise ParseError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("hocket_costs") != VERSION:
        raise ParseError(
            f"{path}: no costs: a file of costs begins with "
            f'{{"hocket_costs": {VERSION}, as `hocket train` writes it'
        )
    try:
        rest: dict[str, Any] = {name: _link(document[name]) for name in _LINKS}
        rest |= {name: _number(name, document[name]) for name in _PLAIN}
        if _SHARD_LINK in document:
            rest[_SHARD_LINK] = _link(document[_SHARD_LINK])
        return Costs(
            stages=tuple(_checked(StageCost, stage) for stage in document["stages"]),
            links=tuple((int(a), int(b), _link(x)) for a, b, x in document["links"]),
            **rest,
        )
    except KeyError as error:
        raise ParseError(f"{path}: there is no {error}") from None
    except (TypeError, ValueError, CostsError) as error:
        raise ParseError(f"{path}: {error}") from None


def _link_json(link: Link) -> dict[str, Any]:
    speed = link.bytes_per_s
    return {**asdict(link), "bytes_per_s": speed if isfinite(speed) else None}


def _link(values: dict[str, Any]) -> Link:
    speed = values["bytes_per_s"]
    return Link(
        _number("latency_s", values["latency_s"]),
        inf if speed is None else _number("bytes_per_s", speed),
        str(values["name"]),
    )


def _checked(kind: type[StageCost], values: dict[str, Any]) -> StageCost:
    known = {field.name for field in fields(kind)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ValueError(f"a stage has no {unknown[0]!r}")
    return kind(**{name: _number(name, value) for name, value in values.items()})


def _number(name: str, value: Any) -> Any:  # noqa: ANN401  (JSON is anything)
    if not isinstance(value, bool | int | float) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a number from 0 on")
    return value
