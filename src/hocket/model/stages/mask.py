"""Replaces an attention mask by the flag `is_causal`, or by none, where it can."""

from __future__ import annotations

import torch
from torch import Tensor


def simplified(mask: Tensor) -> tuple[Tensor | None, bool]:
    """Return a mask as `attn_mask` and `is_causal` of scaled_dot_product_attention.

    Libraries that look at a mask's values to leave it out cannot do so while they are
    captured. A mask that depends on nothing but the shape is looked at here instead,
    once per shape: attention without one, or with the flag, uses a faster kernel and
    the same one as the uncaptured model.

    Args:
        mask: boolean, true where attention is allowed; any leading dimensions, then
            queries x keys.

    Returns:
        The mask, or nothing where it allows everything or is exactly causal; and
        whether it is the latter.
    """
    if mask.dtype != torch.bool or mask.is_meta:
        return mask, False
    if bool(mask.all()):
        return None, False
    num_queries, num_keys = mask.shape[-2:]
    causal = torch.ones_like(mask[..., :, :]).tril()
    if num_queries == num_keys and torch.equal(mask, causal):
        return None, True
    return mask, False
