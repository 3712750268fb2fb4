"""What people combine a pipeline with: each script equals the library's own loop.

Both workers run all scripts in one job, in float64; the loops run here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import hocket
from examples.libraries import averaged, fine_tune, lora
from hocket.errors import ModelError
from tests.run.support.comparison import difference
from tests.run.support.forked_python import run_forked_python

FOLDER: Final = Path(__file__).parents[2] / "examples" / "libraries"
SCRIPTS: Final = ("lora.py", "fine_tune.py", "averaged.py", "with_fabric.py")
IN_TURN: Final = """
import runpy, sys, torch

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    for path in sys.argv[1:]:
        runpy.run_path(path, run_name="__main__")
"""
TOLERANCE: Final = 1e-10
OF_FLOAT32: Final = 1e-5  # transformers computes the loss of a language model in it
State = dict[str, Tensor]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("libraries"),
    # peft asks a model of transformers for its old name of recomputation.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both workers have run every script."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "in_turn.py").write_text(IN_TURN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    scripts = [str(FOLDER / name) for name in SCRIPTS]
    done = run_forked_python(
        [*torchrun, str(folder / "in_turn.py"), *scripts], folder, timeout_s=240.0
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    """As the scripts of the job."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def far(found: State, expected: State) -> float:
    """The largest difference, relative to each tensor's largest entry."""
    assert found.keys() <= expected.keys()  # files leave out what is tied
    return max(difference(found[name], expected[name]) for name in found)


def test_lora_trains_the_adapters_as_a_plain_loop_does(folder: Path) -> None:
    """And saves nothing else."""
    model = lora.make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for inputs, following in lora.make_batches():
        lora.loss(model(**inputs), following).backward()
        optimizer.step()
        optimizer.zero_grad()

    adapters = load_file(folder / "adapters" / "adapter_model.safetensors")
    expected = get_peft_model_state_dict(model)
    assert adapters.keys() == expected.keys()
    assert len(adapters) == len(trained) == 8  # A and B of two layers' q and v
    assert far(adapters, expected) <= TOLERANCE


def test_a_base_model_is_evaluated_in_disable_adapter_and_not_trained() -> None:
    """A step there would train nothing, without a word."""
    base = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    batch = torch.rand(8, 6), torch.rand(8, 3)
    before = nn.functional.mse_loss(base(batch[0]), batch[1]).item()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0", "2"]))
    kept = {k: v.clone() for k, v in model.state_dict().items() if "lora" not in k}
    pipeline = hocket.Pipeline(
        model,
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        example=batch,
        num_microbatches=2,
    )
    for _ in pipeline.train([batch] * 5):
        pass
    with model.disable_adapter():
        assert pipeline.evaluate([batch]).loss == pytest.approx(before, rel=1e-12)
    now = nn.functional.mse_loss(model(batch[0]), batch[1]).item()
    assert pipeline.evaluate([batch]).loss == pytest.approx(now, rel=1e-12)
    assert now != pytest.approx(before)
    refused = pytest.raises(ModelError, match=r"nothing .* would be trained")
    with model.disable_adapter(), refused:
        pipeline.step(batch)
    state = model.state_dict()
    assert all(torch.equal(state[name], kept[name]) for name in kept)


@pytest.fixture(scope="module")
def fine_tuned(folder: Path) -> Any:
    """The model that the script has saved, as `from_pretrained` reads it."""
    return AutoModelForCausalLM.from_pretrained(folder / "fine-tuned")


def _optimizer_and_schedule(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, get_linear_schedule_with_warmup(optimizer, 2, 21)


def test_fine_tuning_generates_as_the_plain_loops_model(fine_tuned: Any) -> None:
    """From the same weights, whatever it is asked."""
    model, loader = fine_tune.make_model(), fine_tune.make_loader()
    optimizer, scheduler = _optimizer_and_schedule(model)
    for _ in range(3):
        for inputs, labels in loader:
            fine_tune.loss_of_tokens(model(**inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    assert far(fine_tuned.state_dict(), model.state_dict()) <= TOLERANCE
    for text in fine_tune.SUMS[::7]:
        prompt = fine_tune.TOKENIZER(text.partition("=")[0] + "=", return_tensors="pt")
        answer = fine_tuned.generate(**prompt, max_new_tokens=3)
        assert torch.equal(answer, model.generate(**prompt, max_new_tokens=3))


class Same(Trainer):
    """With the script's own batches."""

    def get_train_dataloader(self) -> Any:
        """Labels among the inputs, as a model that computes its loss wants them."""
        loader = fine_tune.make_loader()
        loader.collate_fn = fine_tune.COLLATE
        return loader


def test_fine_tuning_is_that_of_transformers_trainer(
    fine_tuned: Any, tmp_path: Path
) -> None:
    """But for rounding: it computes the loss in float32."""
    model = fine_tune.make_model()
    model.loss_type = "ForCausalLM"  # else the first label of a text is counted, too
    arguments = TrainingArguments(
        str(tmp_path),
        num_train_epochs=3,
        max_grad_norm=1.0,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
    )
    Same(model, arguments, optimizers=_optimizer_and_schedule(model)).train()
    assert far(fine_tuned.state_dict(), model.state_dict()) <= OF_FLOAT32


def test_averages_are_those_of_timm(folder: Path) -> None:
    """That moves buffers, too, unless it is asked not to."""
    model = averaged.make_model()
    ema = ModelEmaV3(model, decay=averaged.DECAY, exclude_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, classes in averaged.make_batches():
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
    found = torch.load(folder / "averaged.pt", weights_only=True)
    assert found.keys() == model.state_dict().keys()
    assert far(found, ema.module.state_dict()) <= TOLERANCE


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_a_tied_weight_is_averaged_once() -> None:
    """timm moves it once for each name, beside buffers: a decay of 0.9 acts as 0.81."""
    model, batch = Tied(), (torch.rand(4, 3), torch.rand(4, 3))
    ema = ModelEmaV3(model, decay=0.9)
    first = model.first.weight.detach().clone()
    with hocket.Pipeline(
        model,
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        ema_decay=0.9,
        example=batch,
        num_microbatches=1,
    ) as pipeline:
        pipeline.step(batch)
        ema.update(model)
        moved = model.first.weight.detach() - first
        found = pipeline.state_dict(ema=True)["first.weight"]
        assert difference(found, first + 0.1 * moved) <= TOLERANCE
        theirs = ema.module.state_dict()["first.weight"]
        assert difference(theirs, first + 0.19 * moved) <= TOLERANCE


def test_fabrics_loop_has_the_losses_of_the_pipeline(folder: Path) -> None:
    """Both in the file of Fabric's logger."""
    losses = [_losses(folder / name) for name in ("fabric", "pipeline")]
    assert len(losses[0]) == 7
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)


def _losses(folder: Path) -> list[float]:
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]
