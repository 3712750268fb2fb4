"""Adapters of PEFT (LoRA), trained in a pipeline; the base model stays as it is.

Run it with python, or with torchrun --nproc-per-node 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hocket


def make_model() -> Any:
    """A small Llama with adapters; yours comes from `from_pretrained`."""
    base = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]
    )
    return get_peft_model(LlamaForCausalLM(base), adapters)


def make_batches() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Sequences that count up, and the token that follows each: (8, 15) both."""
    for first in range(10):
        tokens = (torch.arange(8)[:, None] + torch.arange(first, first + 16)) % 64
        yield {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss(output: Any, following: Tensor) -> Tensor:
    """The mean over the microbatch's tokens, as many in each sample."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), following.flatten())


def main() -> None:
    """Train the adapters, and save them alone."""
    torch.manual_seed(0)  # the same weights on every worker
    model = make_model()
    with hocket.Pipeline(
        model,
        loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        example=next(make_batches()),
        num_microbatches=4,
    ) as pipeline:
        for result in pipeline.train(make_batches()):
            if pipeline.is_main:
                print(f"step {result.step}: loss {result.loss:.4f}")
        pipeline.gather_into(model)  # each worker has trained its own stages
        if pipeline.is_main:
            model.save_pretrained("adapters")


if __name__ == "__main__":
    main()
