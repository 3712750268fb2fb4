"""Whatever a recipe or a setting says: it is resolved, or refused line by line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hocket.errors import RecipeError
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import builtin_names, resolve
from tests.recipes.config.test_recipe import keys, section_classes
from tests.recipes.config.test_resolve import SMALL, faults, write

SECTIONS: Final = [*Recipe.model_fields, "nothing"]
NAMES: Final = sorted({key for _, key in keys()} | {"kind", "nothing", "0"})
KINDS: Final = sorted(
    {
        kind
        for cls in section_classes()
        if "kind" in cls.model_fields
        for kind in get_args(cls.model_fields["kind"].annotation)
    }
)
WORDS: Final = [*KINDS, *SECTIONS, "auto", "a:b", "x.csv", "4x2", "../x", "~nobody"]

VALUES: Final = st.recursive(
    st.booleans()
    | st.integers(-3, 12)
    | st.sampled_from([2**63, -(10**400), 16**3000])
    | st.floats()
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
    | st.sampled_from(WORDS),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(NAMES), x),
    max_leaves=4,
)

MARKS: Final = st.sampled_from("[]{}=.\"'#\n \\abk1-e_:,T")


def resolve_or_refuse(source: str, given_settings: list[str]) -> None:
    """The recipe that was resolved reads back; a refusal has a line for each fault."""
    message = ""
    try:
        text = resolve(source, given_settings).to_toml()
    except RecipeError as error:
        message = str(error)
    else:
        text.encode()
        (Path("again.toml")).write_text(text, encoding="utf-8")
        resolve("again.toml", allow_outside=True)
    assert len(message.splitlines()) < 60
    assert all(len(line) < 1000 for line in message.splitlines())


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    base=st.sampled_from(builtin_names()),
    said=st.lists(
        st.tuples(
            st.sampled_from(SECTIONS),
            st.sampled_from(NAMES),
            VALUES,
        ),
        max_size=4,
    ),
)
@example(base="digits-vit", said=[("checkpoint", "kind", [1])])
@example(base="digits-vit", said=[("model", "kind", [1])])
@example(base="digits-vit", said=[("model", "kind", {"a": 1})])
def test_any_settings(
    free_dir: Path, base: str, said: list[tuple[str, str, Any]]
) -> None:
    """Over each built-in recipe, with real keys and any values."""
    resolve_or_refuse(
        base,
        ["data.path=any", *(f"{a}.{b}={toml(value)}" for a, b, value in said)],
    )


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sections=st.dictionaries(
        st.sampled_from(SECTIONS),
        st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4) | VALUES,
        max_size=5,
    )
)
def test_any_sections(free_dir: Path, sections: dict[str, Any]) -> None:
    """A file whose sections may be anything."""
    text = "\n".join(f"{name} = {toml(value)}" for name, value in sections.items())
    resolve_or_refuse(write(free_dir, text), [])


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    text=st.text(
        st.sampled_from("[]{}=.\"'#\n \\abk1-e_:,T") | st.characters(), max_size=40
    )
)
def test_any_text(free_dir: Path, text: str) -> None:
    """A file, and a setting, of any characters."""
    (free_dir / "mine.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    resolve_or_refuse("mine.toml", [])
    resolve_or_refuse("digits-vit", [text, f"run.name={text}", f"model.{text}"])


def toml(value: Any) -> str:
    """A value as TOML."""
    match value:
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            pairs = (f"{json.dumps(key)} = {toml(x)}" for key, x in value.items())
            return f"{{{', '.join(pairs)}}}"
        case float():
            return str(value)
        case _:
            text = json.dumps(value, ensure_ascii=False)
            return text.replace("\x7f", "\\u007f")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[" * 100_000, "recursion depth"),
        ("{a=" * 100_000, "recursion depth"),
        ("9" * 5000, "4300"),
        ("1" * 400, "model.x: an integer of more than 64 bits .*line 3"),
        ("0x" + "f" * 5000, "model.x: an integer of more than 64 bits"),
    ],
)
def test_values_without_end_name_their_line(
    free_dir: Path, value: str, words: str
) -> None:
    """Python's own limits used to end in a traceback."""
    text = SMALL.replace('kind = "vit"', f'kind = "vit"\nx = {value}')
    message = faults(write(free_dir, text))
    assert "mine.toml" in message
    assert "line 3" in message
    assert re.search(words, message)
    assert len(message) < 500


def test_invalid_options_are_reported_beside_all_else(free_dir: Path) -> None:
    """Not only when unknown keys and wrong types are mended, over all sections."""
    message = faults(
        write(free_dir, SMALL),
        "training.accumulate=0",
        "training.clip_norm=-1.0",
        "training.sed=3",
        "pipeline.max_delay=-1",
        "pipeline.num_microbatches=0",
        "pipeline.precison=1",
        "pipeline.num_workers=many",
        "run.name=../x",
    )
    assert "has 8 faults" in message
    for words in ("accumulate is 0", "clip_norm is -1.0", "max_delay is -1"):
        assert words in message
