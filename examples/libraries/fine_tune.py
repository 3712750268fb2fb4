"""Fine-tune a model of transformers as its Trainer does; then it generates."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

import hocket

# "3 + 4 = 7 .", "9 5 + 8 = 1 0 3 .": a token a word. Your tokenizer comes from files.
PAIRS = [(a, b) for a in (*range(9), 95) for b in range(10)]
SUMS = [f"{' '.join(str(a))} + {b} = {' '.join(str(a + b))} ." for a, b in PAIRS]
WORDS = {word: i for i, word in enumerate(["[PAD]", *"+=.0123456789"])}
SPLIT = Tokenizer(models.WordLevel(WORDS))
SPLIT.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
TOKENIZER = transformers.PreTrainedTokenizerFast(
    tokenizer_object=SPLIT, pad_token="[PAD]", eos_token="."
)
COLLATE = transformers.DataCollatorForLanguageModeling(TOKENIZER, mlm=False)


def batch_of(rows: list[Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs and labels, of which padding is -100: (16, the longest's length) each."""
    batch = dict(COLLATE(rows))
    return batch, batch.pop("labels")


def make_loader() -> DataLoader[Any]:
    """Sums, in batches as long as their longest, shuffled alike on every worker."""
    data = Dataset.from_dict(dict(TOKENIZER(SUMS)))
    seeded = torch.Generator().manual_seed(0)
    return DataLoader(data, 16, shuffle=True, generator=seeded, collate_fn=batch_of)


def make_model() -> Any:
    """A small GPT-2 without dropout; yours comes from `from_pretrained`."""
    settings: dict[str, Any] = {"vocab_size": len(WORDS), "n_embd": 32, "n_layer": 2}
    settings |= {"n_head": 2, "bos_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
    settings |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    config = transformers.GPT2Config(**settings, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def loss_of_tokens(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the labels that follow a token and are no padding."""
    logits = output.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def main() -> None:
    """Train, save as `from_pretrained` reads it, and generate."""
    torch.manual_seed(0)  # the same weights on every worker
    model, loader = make_model(), make_loader()
    with hocket.Pipeline(
        model,
        hocket.TokenMean(loss_of_tokens, lambda labels: (labels[:, 1:] != -100).sum()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=lambda x: transformers.get_linear_schedule_with_warmup(x, 2, 21),
        clip_norm=1.0,
        example=next(iter(make_loader())),
        num_microbatches=4,
    ) as pipeline:
        losses = [x.loss for _ in range(3) for x in pipeline.train(loader)]
        pipeline.gather_into(model)  # each worker has trained its own stages
        if pipeline.is_main:
            model.save_pretrained("fine-tuned")
            trained: Any = transformers.GPT2LMHeadModel.from_pretrained("fine-tuned")
            tokens = TOKENIZER("3 + 4 =", return_tensors="pt")
            words = trained.generate(**tokens, max_new_tokens=3)
            print(f"loss {losses[-1]:.4f}: {TOKENIZER.decode(words[0])}")


if __name__ == "__main__":
    main()
