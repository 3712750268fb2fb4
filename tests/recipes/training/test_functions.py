"""The user's own functions, named by a recipe; errors say what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from hocket.errors import DataError, ModelError, RecipeError
from hocket.recipes import user_functions
from hocket.recipes.config.recipe import Recipe
from hocket.recipes.config.resolve import resolve
from hocket.recipes.data import DatasetSamples
from hocket.recipes.training.records import EvaluationRecord
from hocket.recipes.training.run_folder import claim_folder
from hocket.recipes.training.task import make_task
from hocket.recipes.training.train import train_recipe
from hocket.recipes.user_functions import load_function
from hocket.run.data.samples import EpochRandom
from tests.recipes.support.user_functions import write_own


def train(
    source: str, monkeypatch: pytest.MonkeyPatch, *settings: str
) -> EvaluationRecord:
    """Train a recipe in this process."""
    resolved = resolve(source, settings)
    for folder in resolved.import_folders:
        monkeypatch.syspath_prepend(folder)
    run_dir = claim_folder(Path(source).parent / "run", resolved.to_toml())
    return train_recipe(resolved.recipe, run_dir)


def test_the_users_functions_are_what_is_trained(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, arguments, data, loss and metrics, all of them."""
    source = write_own(free_dir, "own_all")
    evaluation = train(source, monkeypatch, "training.num_epochs=20")

    assert evaluation.num_samples == 32
    assert set(evaluation.metrics) == {"accuracy"}
    assert evaluation.metrics["accuracy"] > 0.5
    model = make_task(resolve(source).recipe).make_model()
    assert isinstance(model, nn.Sequential)
    assert model[0].weight.shape == (16, 4)


def test_own_models_may_take_hockets_data(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loss and the metrics that these bring along."""
    source = write_own(
        free_dir,
        "own_model_only",
        ("nn.Linear(4, width)", "nn.Flatten(), nn.Linear(64, width)"),
        ("nn.Linear(width, 3)", "nn.Linear(width, 10)"),
    )
    text = Path(source).read_text()
    before, _, rest = text.partition("[data]")
    optimizer = rest[rest.index("[optimizer]") :]
    Path(source).write_text(f'{before}[data]\nkind = "digits"\n\n{optimizer}')
    evaluation = train(source, monkeypatch, "training.max_steps=2")

    assert evaluation.num_samples == 450
    assert set(evaluation.metrics) == {"accuracy"}


def test_a_model_is_named_by_its_import_path(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a library, in a recipe's file; its keys are the arguments."""
    pytest.importorskip("torchvision", reason="extra `vision`")
    source = write_own(free_dir, "own_images", ("(96, 4,", "(96, 3, 32, 32,"))
    text = Path(source).read_text().replace("width = 16", "num_classes = 3")
    text = text.replace("own_images:make_model", "torchvision.models:resnet18")
    Path(source).write_text(text)
    model = make_task(own(source, monkeypatch)).make_model()
    assert type(model).__name__ == "ResNet"
    assert model.get_parameter("fc.weight").shape == (3, 512)


def own(source: str, monkeypatch: pytest.MonkeyPatch, *settings: str) -> Recipe:
    """The recipe of a file, whose functions can be imported."""
    resolved = resolve(source, settings)
    for folder in resolved.import_folders:
        monkeypatch.syspath_prepend(folder)
    return resolved.recipe


def test_a_model_asks_for_the_data(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a parameter of this name: it gets what is trained on, all of it."""
    body = "(data, width=8):\n    assert data.num_samples == 64\n"
    source = write_own(free_dir, "own_asks", ("(width=8):\n", body))
    task = make_task(own(source, monkeypatch, "data.max_samples=20"))
    assert task.training.num_samples == 20
    assert isinstance(task.make_model(), nn.Sequential)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.widht=3"], r"model\.widht: .* no argument .*did you mean 'width'"),
        (["model.width="], r"model\.width: missing: .*--set model\.width=VALUE"),
        (["data.rows=1"], r"data\.rows: own_\d+:make_data has no argument 'rows'"),
    ],
)
def test_other_keys_are_arguments(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], message: str
) -> None:
    """One too many and one too few are named, with the section and the way out."""
    module = f"own_{abs(hash(message))}"
    source = write_own(free_dir, module, ("(width=8)", "(width)"))
    with pytest.raises(RecipeError, match=message):
        make_task(own(source, monkeypatch, *settings)).make_model()


def test_the_zoo_is_in_a_checkout(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe's file may name it; elsewhere the error says where it is to be had."""
    source = write_own(free_dir, "own_zoo")
    text = Path(source).read_text()
    text = text.replace("own_zoo:make_model", "examples.zoo.absent:net")
    Path(source).write_text(text)
    root = Path(__file__).parents[3]
    assert resolve(source).import_folders == (free_dir, root)
    with pytest.raises(RecipeError, match=r"pip install 'hocket\[recipes,vision\]'"):
        load_function("examples.zoo.absent:net")
    monkeypatch.setattr(user_functions, "_REPOSITORY", free_dir)
    assert resolve(source).import_folders == (free_dir,)
    with pytest.raises(RecipeError, match=r"in hocket's repository.* in a checkout"):
        load_function("examples.zoo.absent:net")
    (free_dir / "examples" / "zoo").mkdir(parents=True)
    assert resolve(source).import_folders == (free_dir, free_dir)


def test_own_data_need_a_loss(free_dir: Path) -> None:
    """Only the user can know what is wanted of them."""
    source = write_own(free_dir, "own_no_loss")
    text = Path(source).read_text()
    Path(source).write_text(text.replace('loss = "own_no_loss:loss"\n', ""))
    with pytest.raises(RecipeError, match=r"task\.loss: missing.*bring no loss"):
        resolve(source)


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("import torch\n", "import absent_module\n", RecipeError, "absent_module"),
        ("def make_model(", "def other(", RecipeError, "has no function 'make_model'"),
        ("return nn.Sequential(", "return (", RecipeError, "must return a torch.nn"),
        (
            "return samples[:64], samples[64:]",
            "return samples",
            RecipeError,
            "must return a pair",
        ),
        (
            "return samples[:64], samples[64:]",
            "return 1, 2",
            RecipeError,
            "returned a pair with int in it",
        ),
        (
            "return samples[:64], samples[64:]",
            "return samples[:8], samples[64:]",
            DataError,
            "8 samples to train on do not fill one batch of 16",
        ),
        (
            "return samples[:64], samples[64:]",
            "return inputs, inputs",
            DataError,
            r"sample 0 of the data set is a Tensor: it must be a pair",
        ),
        (
            "samples = list(zip(inputs, ",
            "samples = list(zip([torch.zeros(i % 3 + 2) for i in range(96)], ",
            DataError,
            "cannot be put together",
        ),
        (
            "return functional.cross_entropy(output, labels)",
            "return functional.cross_entropy(output, labels, reduction='none')",
            ModelError,
            "mean over the microbatch's samples",
        ),
        (
            "return functional.cross_entropy(output, labels)",
            "return None",
            ModelError,
            "must return a scalar tensor or a dict",
        ),
    ],
)
def test_what_is_wrong_with_them_is_said(
    free_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    old: str,
    new: str,
    kind: type[Exception],
    message: str,
) -> None:
    """An error of ours with what was expected, not one from somewhere inside."""
    number = abs(hash(request.node.name))
    source = write_own(free_dir, f"own_wrong_{number}", (old, new))
    with pytest.raises(kind, match=message):
        train(source, monkeypatch)


def test_callbacks_are_called_with_everything(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, evaluations, the end; what has no such method is refused by name."""
    source = write_own(free_dir, "own_callback", code=CALLBACK)
    train(source, monkeypatch, 'run.callbacks=["own_callback:Teller"]')

    reported = (free_dir / "run" / "calls.txt").read_text().split()
    assert reported == [*["step"] * 4, "evaluation"] * 3 + ["summary", "close"]
    (free_dir / "run").rename(free_dir / "first")
    with pytest.raises(RecipeError, match="int without step, evaluation, summary"):
        train(source, monkeypatch, 'run.callbacks=["own_callback:make_nothing"]')


def test_own_loggers_get_numbers_where_tensorboard_does(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every second step; it is made with the run's folder, and closed."""
    source = write_own(free_dir, "own_logger", code=LOGGER)
    names = 'run.loggers=["tensorboard", "own_logger:Lines"]'
    settings = (names, "run.log_every_steps=2")
    train(source, monkeypatch, *settings, "training.max_steps=4")

    run_dir = free_dir / "run"
    assert (run_dir / "tensorboard").is_dir()
    logged = [line.split() for line in (run_dir / "own.txt").read_text().splitlines()]
    assert [step for step, *_ in logged] == ["0", "2", "4", "4", "closed"]
    assert "train/loss" in logged[0]
    assert {"epoch/samples_per_s", "epoch/data_s"} <= {*logged[2]}
    assert "evaluation/accuracy" in logged[3]
    run_dir.rename(free_dir / "first")
    with pytest.raises(RecipeError, match="int without log: a logger has"):
        train(source, monkeypatch, 'run.loggers=["own_logger:make_nothing"]')
    with pytest.raises(RecipeError, match="should be 'tensorboard', or name a funct"):
        resolve(source, ['run.loggers=["board"]'])


LOGGER = """


class Lines:
    def __init__(self, run_dir):
        self.file = (run_dir / "own.txt").open("w")

    def log(self, numbers, step):
        print(step, *numbers, file=self.file)

    def close(self):
        print("closed", file=self.file)
        self.file.close()


def make_nothing(run_dir):
    return 0
"""

CALLBACK = """


class Teller:
    def __init__(self, run_dir):
        self.file = (run_dir / "calls.txt").open("w")

    def step(self, record):
        print("step", file=self.file)

    def evaluation(self, record):
        print("evaluation", file=self.file)

    def summary(self, record):
        print("summary", file=self.file)

    def close(self):
        print("close", file=self.file)
        self.file.close()


def make_nothing(run_dir):
    return 1
"""

NONE_MODEL = """
class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        self.linear(x)


def make_model(width):
    return Nothing()
"""


def test_a_forward_that_returns_none(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten `return`."""
    source = write_own(free_dir, "own_none", code=NONE_MODEL)
    with pytest.raises(ModelError, match=r"forward returned None"):
        train(source, monkeypatch)


def test_labels_out_of_range(free_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that the model has no score for, with the loss that knows classes."""
    source = write_own(
        free_dir, "own_labels", ("[:, :3].argmax(1)", "[:, :3].argmax(1) + 3")
    )
    with pytest.raises(DataError, match=r"label \d \(sample \d .* not from 0 to 2"):
        train(
            source,
            monkeypatch,
            "task.loss=hocket.recipes.objectives:class_loss",
        )


GROWING = """
class Growing:
    num_samples = 64
    fingerprint = 1

    def inputs(self, rows, draw):
        return torch.zeros(len(rows), 4 if draw is None else 5)

    def targets(self, rows, draw):
        return torch.zeros(len(rows), dtype=torch.int64)


def make_data():
    return Growing(), Growing()
"""


def test_shapes_that_change_between_batches(
    free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both shapes are named, before anything is computed with the second."""
    source = write_own(free_dir, "own_growing", code=GROWING)
    with pytest.raises(ModelError, match=r"(?s)\(\w+, 5\)|5"):
        train(source, monkeypatch)


def test_batches_smaller_than_microbatches(free_dir: Path) -> None:
    """The error has all three numbers, before anything starts."""
    source = write_own(free_dir, "own_few")
    with pytest.raises(RecipeError, match=r"batch_size 16 is less .* 1 x .* 20"):
        resolve(source, ["pipeline.num_microbatches=20"])


def test_datasets_are_put_together_as_torch_does_it() -> None:
    """Tensors are stacked; tuples and dicts of inputs stay what they are."""
    data: Sequence[tuple[object, int]] = [
        ((torch.tensor(i), {"x": torch.ones(2) * i}), i % 2) for i in range(5)
    ]
    samples = DatasetSamples(data)
    rows = torch.tensor([4, 1])
    first, second = samples.inputs(rows, EpochRandom(0, 0))

    assert samples.num_samples == 5
    assert first.tolist() == [4, 1]
    assert second["x"].tolist() == [[4.0, 4.0], [1.0, 1.0]]
    assert samples.targets(rows, None).tolist() == [0, 1]


def test_other_data_have_another_fingerprint() -> None:
    """So that workers notice when theirs differ."""
    data = [(torch.tensor([float(i)]), i) for i in range(5)]
    fingerprints = {
        DatasetSamples(part).fingerprint for part in (data, data[:4], data[1:], [])
    }
    assert len(fingerprints) == 4
    assert DatasetSamples(list(data)).fingerprint in fingerprints
