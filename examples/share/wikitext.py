"""A job: Transformer-XL on the words of a text, such as those of WikiText-103.

    python -m examples.share.wikitext wiki.train.tokens

The memory lives from one batch to the next.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hocket
from examples.share.loop import Loop
from examples.share.transformer_xl import STANDARD, Words


def read_words(path: str) -> tuple[Tensor, int]:
    """Return all words of a file as numbers, and how many kinds there are."""
    words = Path(path).read_text(encoding="utf-8").replace("\n", " <eos> ").split()
    ids = {word: i for i, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([ids[word] for word in words]), len(ids)


def make(
    path: str,
    size: dict[str, int],
    batch_size: int,
    amp: bool,
    batch_chunk: int,
    job: Any,
) -> Any:
    """The job: B places of the text at once, T words further with each batch."""
    ids_N, num_ids = read_words(path)
    model = Words(num_ids, size).to(job.device)
    loop = Loop(
        job, torch.optim.Adam(model.parameters(), 2.5e-4), amp=amp, clip_norm=0.25
    )
    ids_BN = ids_N[: len(ids_N) // batch_size * batch_size].view(batch_size, -1)
    memories: list[Any] = [None] * batch_chunk

    def batches() -> Iterator[Tensor]:
        while True:
            yield from ids_BN.unfold(1, size["words"] + 1, size["words"]).unbind(1)

    def step(ids_BT: Tensor) -> Tensor:
        def loss_of(chunk: Any) -> Tensor:
            number, own_BT = chunk
            loss, memories[number] = model(
                own_BT[:, :-1], own_BT[:, 1:], memories[number]
            )
            return loss

        chunks = ids_BT.to(job.device).chunk(batch_chunk)
        sizes = [len(own_BT) for own_BT in chunks]
        return loop.update([*enumerate(chunks)], sizes, loss_of)

    return step, batches()


if __name__ == "__main__":
    jobs = [hocket.Job("a", partial(make, sys.argv[1], STANDARD, 8, False, 1))]
    print(hocket.share(jobs, num_iterations=100))
