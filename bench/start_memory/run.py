"""What a worker takes until its first step, of a model that none of them holds whole.

    python -m bench.start_memory.run

A Llama of 2 GB, saved by `save_pretrained` in several files, starts on 2 and on 4
workers: made on `meta` with `weights=` its folder, and, in turn with that, made and
loaded whole by each worker. Every few milliseconds a thread of each worker reads its
anonymous and its shared memory. What a pipeline of the same model of next to no width
takes is taken off. Activations count, and are few: 8 sentences of 4 tokens.

    share       the bytes of the weights of a worker's stages
    allowed     1.15 x share + share (gradients, in the dry run) + the largest layer
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

import hocket
from bench.measure import environment, write_result

RESULTS: Final = Path(__file__).parent / "results"
EVERY_S: Final = 0.003
NUM_MICROBATCHES: Final = 4
NUM_TOKENS: Final = 4
VOCABULARY: Final = 32_000


class Peak:
    """The most anonymous and shared memory of this process, sampled by a thread."""

    def __init__(self) -> None:
        self.num_bytes = self.now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        """Bytes at this moment."""
        status = Path("/proc/self/status").read_text().splitlines()
        found = (x.split() for x in status if x.startswith(("RssAnon", "RssShmem")))
        return sum(int(x[1]) << 10 for x in found)

    def end(self) -> int:
        """Return the most bytes so far."""
        self._is_over.set()
        self._thread.join()
        return max(self.num_bytes, self.now())

    def _watch(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self.num_bytes = max(self.num_bytes, self.now())


def config(num_layers: int, width: int) -> Any:
    """A Llama's."""
    from transformers import LlamaConfig

    own: Any = LlamaConfig
    return own(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCABULARY,
        use_cache=False,
        attn_implementation="sdpa",
    )


def loss(output: Any, targets: Tensor) -> Tensor:
    """Of the next token; which one it is does not matter here."""
    return nn.functional.cross_entropy(
        output["logits"].flatten(0, 1), targets.flatten()
    )


def batch() -> tuple[dict[str, Tensor], Tensor]:
    """Eight short sentences."""
    ids = torch.arange(8 * NUM_TOKENS).reshape(8, NUM_TOKENS) % VOCABULARY
    return {"input_ids": ids}, ids


def empty(own: Any) -> int:
    """The most that a pipeline of the same model of next to no width takes, in bytes.

    It has imported, captured and planned the same.
    """
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    peak = Peak()
    narrow = config(own.num_hidden_layers, 32)
    pipeline_of(LlamaForCausalLM(narrow).train(), None).close()
    return peak.end()


def pipeline_of(model: nn.Module, weights: str | None) -> hocket.Pipeline:
    """A pipeline that trains by plain SGD."""
    return hocket.Pipeline(
        model,
        loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        example=batch(),
        num_microbatches=NUM_MICROBATCHES,
        weights=weights,
    )


def start(folder: str, how: str) -> dict[str, float]:
    """Start on this worker; return what it took, and what it may take."""
    import transformers.modeling_utils  # noqa: F401  (its import is no part of a start)
    from transformers import LlamaConfig, LlamaForCausalLM

    own = LlamaConfig.from_pretrained(folder)
    without = empty(own)
    gc.collect()
    begin_s, peak = perf_counter(), Peak()
    if how == "meta":
        with torch.device("meta"):
            model = LlamaForCausalLM(own)
    else:
        model = LlamaForCausalLM.from_pretrained(folder)
    sizes = [
        sum(x.nbytes for x in part.parameters())
        for part in (*model.model.layers, model.model.embed_tokens, model.lm_head)
    ]
    pipeline = pipeline_of(model.train(), folder if how == "meta" else None)
    seconds, most = perf_counter() - begin_s, peak.end()
    own_names = pipeline.plan.state_names[pipeline.world.rank]
    held = dict(model.named_parameters())
    share = sum(held[x].nbytes for x in own_names if x in held)
    pipeline.step(batch())
    return {
        "seconds": seconds,
        "peak_mb": (most - without) / 1e6,
        "share_mb": share / 1e6,
        "allowed_mb": (2.15 * share + max(sizes)) / 1e6,
        "model_mb": sum(x.nbytes for x in held.values()) / 1e6,
        "empty_mb": without / 1e6,
    }


def make_folder(folder: str, num_layers: int, width: int) -> None:
    """Save a random model in several files."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(config(num_layers, width))
    model.save_pretrained(folder, max_shard_size="500MB")


def main() -> None:
    """Measure, print, and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hows", nargs="+", default=["meta", "whole"])
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shape = arguments.layers, arguments.width
        hocket.launch(make_folder, (folder, *shape), num_workers=1)
        for number in range(arguments.rounds):
            for num_workers in arguments.workers:
                for how in arguments.hows:
                    found = hocket.launch(
                        start, (folder, how), num_workers=num_workers, timeout_s=600
                    )
                    for rank, row in enumerate(found):
                        row |= {"workers": num_workers, "rank": rank, "round": number}
                        rows.append(row | {"how": how})
                        print(how, {k: round(v, 2) for k, v in row.items()}, flush=True)
    write_result(arguments.output, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
