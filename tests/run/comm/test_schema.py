"""What a message holds: text, digest, layout, and tags."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import SchemaError
from hocket.run.comm.schema import (
    ALIGNMENT_BYTES,
    ANY,
    Schema,
    TensorSpec,
    message_tag,
    schema_of,
    tag_digest,
    tag_salt,
    tag_text,
)

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
specs = st.builds(TensorSpec, shapes, st.sampled_from(DTYPES))
schemas = st.lists(specs, max_size=5).map(lambda tensors: Schema(tuple(tensors)))


def made_of(text: str) -> list[torch.Tensor]:
    """Zeros of a schema's shapes and types."""
    return [
        torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in Schema.parse(text).tensors
    ]


@given(schemas)
def test_text_says_everything(schema: Schema) -> None:
    """A schema travels as text: what is read is what was written."""
    assert Schema.parse(str(schema)) == schema


@given(schemas, schemas)
def test_digests_of_other_schemas_differ(a: Schema, b: Schema) -> None:
    """Shape, type and order all count; and equal schemas have equal digests."""
    assert (a == b) == (a.digest == b.digest)


def test_digest_is_the_same_everywhere() -> None:
    """Workers of different processes, hosts and versions compare digests."""
    assert Schema.parse("float32[4, 8], int64[4]").digest == 0xBB48360C


@pytest.mark.parametrize(
    "text",
    ["", "float32", "float32[4", "float32[4,8]", "float32[a]", "[4]", "float32[4];"],
)
def test_refuses_text_that_is_no_schema(text: str) -> None:
    """The error repeats the text, or what is wrong in it."""
    with pytest.raises(SchemaError, match=r"is no schema|are no numbers"):
        Schema.parse(text)


@pytest.mark.parametrize("name", ["float31", "Tensor", "nn", ""])
def test_refuses_types_that_torch_does_not_have(name: str) -> None:
    """A name of something else in torch is no type either."""
    with pytest.raises(SchemaError, match="torch has no type"):
        Schema((TensorSpec((4,), name),))


@given(schemas)
def test_layout_is_aligned_and_without_overlap(schema: Schema) -> None:
    """Every tensor begins at a multiple of 64 bytes, after the end of the last one."""
    flat = torch.zeros(schema.num_bytes, dtype=torch.uint8)
    end = 0
    for spec, view in zip(schema.tensors, schema.views(flat), strict=True):
        at = view.data_ptr() - flat.data_ptr() if view.numel() else end
        assert at == end
        assert at % ALIGNMENT_BYTES == 0
        assert view.shape == spec.shape
        num_bytes = math.prod(spec.shape) * view.dtype.itemsize
        end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    assert end == schema.num_bytes


@given(schemas, st.integers(0, 2**32 - 1))
def test_views_hold_what_is_put_into_them(schema: Schema, seed: int) -> None:
    """Each tensor keeps its bits, whatever lies beside it."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.empty(schema.num_bytes, dtype=torch.uint8)
    sources = []
    for spec, view in zip(schema.tensors, schema.views(flat), strict=True):
        size = math.prod(spec.shape) * view.dtype.itemsize
        bits = torch.randint(0, 2, (size,), dtype=torch.uint8, generator=generator)
        sources.append(bits.view(view.dtype).view(spec.shape))
        view.copy_(sources[-1])
    for source, view in zip(sources, schema.views(flat), strict=True):
        assert torch.equal(
            source.reshape(-1).view(torch.uint8), view.reshape(-1).view(torch.uint8)
        )


def test_views_count_changes_for_themselves() -> None:
    """A stage may change one input in place while autograd has saved another."""
    flat = torch.zeros(256, dtype=torch.uint8)
    x, y = Schema.parse("float32[4], float32[4]").views(flat)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * y).sum()
    x.add_(1.0)
    loss.backward()

    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0] * 4


def test_schema_of_names_shapes_and_types_in_order() -> None:
    """Strides and gradients do not matter: the message is dense."""
    tensors = [
        torch.zeros(4, 8).t(),
        torch.zeros((), dtype=torch.bool),
        torch.zeros(0, 3, dtype=torch.bfloat16, requires_grad=True),
    ]

    assert str(schema_of(tensors)) == "float32[8, 4], bool[], bfloat16[0, 3]"


@pytest.mark.parametrize(
    "other",
    ["float32[4, 9]", "float64[4, 8]", "float32[4, 8], bool[]", "float32[8, 4]"],
)
def test_holds_sees_every_difference(other: str) -> None:
    """Shape, type and number of tensors."""
    schema = Schema.parse("float32[4, 8]")

    assert schema.holds(made_of("float32[4, 8]"))
    assert not schema.holds(made_of(other))


def test_a_pattern_leaves_open_what_the_batch_decides() -> None:
    """Number of tensors, types and all other dimensions must be right."""
    pattern = Schema((TensorSpec((ANY, 8), "float32"),))

    assert Schema.parse(str(pattern)) == pattern
    assert Schema.parse("float32[4, 8]").fits(pattern)
    assert Schema.parse("float32[0, 8]").fits(pattern)
    for other in ("float32[4, 9]", "float64[4, 8]", "float32[4]", "no tensors"):
        assert not Schema.parse(other).fits(pattern)


@given(
    st.tuples(schemas, st.integers(0, 2**40 - 1), st.integers(0, 2**24 - 1)),
    st.tuples(schemas, st.integers(0, 2**40 - 1), st.integers(0, 2**24 - 1)),
    st.integers(0, 2**32 - 1),
)
def test_tags_are_unique(
    a: tuple[Schema, int, int], b: tuple[Schema, int, int], salt: int
) -> None:
    """Two messages have one tag only if they agree in everything."""
    tag = message_tag(*a, salt)

    assert (tag == message_tag(*b, salt)) == (a == b)
    assert tag != message_tag(*a, salt ^ 1)
    assert tag_digest(tag) == a[0].digest
    assert tag_salt(tag) == salt
    assert tag_text(tag) == f"step {a[1]}, microbatch {a[2]}"
    assert 0 <= tag < 1 << 128
