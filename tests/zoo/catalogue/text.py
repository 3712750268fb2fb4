"""Language models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from tests.model.support.stages_by_hand import Case

NUM_WORDS = 40
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": NUM_WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def words(num_tokens: int = 8) -> Tensor:
    """A batch of token ids, none of them padding."""
    return torch.randint(2, NUM_WORDS, (4, num_tokens))


def causal(name: str, **settings: Any) -> Case:
    """A decoder that predicts tokens, without a cache."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return Case(model.train(), (), {"input_ids": words(), "use_cache": False})


def classifier(name: str, **settings: Any) -> Case:
    """An encoder that classifies, with a mask of padding."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{name}ForSequenceClassification")(config)
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[0, 5:] = mask[2, 6:] = 0
    return Case(model.train(), (), {"input_ids": words(), "attention_mask": mask})


CASES: Final[dict[str, Callable[[], Case]]] = {
    "albert": partial(classifier, "Albert", embedding_size=8),
    "bloom": partial(causal, "Bloom", n_layer=2, n_head=2),
    "deberta": partial(classifier, "Deberta"),
    "electra": partial(classifier, "Electra", embedding_size=8),
    "falcon": partial(causal, "Falcon"),
    "gemma": partial(causal, "Gemma", num_key_value_heads=1, head_dim=8),
    "gpt-neox": partial(causal, "GPTNeoX"),
    "jamba": partial(
        causal,
        "Jamba",
        num_key_value_heads=2,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        experts_implementation="eager",  # others take no float64
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "llama": partial(causal, "Llama", num_key_value_heads=2),
    "longformer": partial(classifier, "Longformer", attention_window=[4, 4]),
    "mamba": partial(causal, "Mamba", state_size=4),
    "mistral": partial(causal, "Mistral", num_key_value_heads=2),
    "mixtral": partial(
        causal,
        "Mixtral",
        num_key_value_heads=2,
        num_local_experts=3,
        experts_implementation="eager",
    ),
    "opt": partial(causal, "OPT", ffn_dim=32, word_embed_proj_dim=16),
    "phi": partial(causal, "Phi"),
    "qwen2": partial(causal, "Qwen2", num_key_value_heads=2),
    "qwen2-moe": partial(
        causal,
        "Qwen2Moe",
        num_key_value_heads=2,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        experts_implementation="eager",
    ),
    "roberta": partial(classifier, "Roberta"),
}
