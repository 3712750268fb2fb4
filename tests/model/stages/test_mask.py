"""A mask is left out exactly where a flag says the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hocket.model.stages.emit import simplified

sizes = st.integers(1, 5)


@given(sizes, sizes, st.integers(0, 2**31))
def test_attention_is_the_same(num_queries: int, num_keys: int, seed: int) -> None:
    """For masks of all kinds, among them the two that can be left out."""
    draw = torch.Generator().manual_seed(seed)
    ones = torch.ones(2, 1, num_queries, num_keys, dtype=torch.bool)
    noise = torch.rand(ones.shape, generator=draw) > 0.3
    noise[..., 0] = True  # a query that may see nothing has no answer
    query = torch.randn(2, 3, num_queries, 4, generator=draw)
    key, value = torch.randn(2, 2, 3, num_keys, 4, generator=draw)
    for mask in (ones, ones.tril(), noise):
        simple, is_causal = simplified(mask)

        got = F.scaled_dot_product_attention(
            query, key, value, simple, is_causal=is_causal
        )

        expected = F.scaled_dot_product_attention(query, key, value, mask)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.ones(2, 1, 4, 4, dtype=torch.bool), (True, False)),
        (torch.ones(3, 5, dtype=torch.bool), (True, False)),
        (torch.ones(2, 1, 4, 4, dtype=torch.bool).tril(), (True, True)),
        (torch.ones(4, 5, dtype=torch.bool).tril(), (False, False)),
        (torch.ones(4, 4, dtype=torch.bool).triu(), (False, False)),
        (torch.ones(4, 4), (False, False)),
        (torch.ones(4, 4, dtype=torch.bool, device="meta"), (False, False)),
    ],
)
def test_only_whole_and_causal_masks_are_left_out(
    mask: torch.Tensor, expected: tuple[bool, bool]
) -> None:
    """Numbers, other shapes, and masks without data stay as they are."""
    simple, is_causal = simplified(mask)

    assert (simple is None, is_causal) == expected
