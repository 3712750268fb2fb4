"""The arguments of a pipeline, in one frozen object.

    Pipeline(...) ──▶ PipelineConfig ──▶ Plan ──▶ Executor ──▶ Driver

The options that recipes have too are in `hocket.options`; here are those that need
torch, or belong to one job. `Pipeline` takes its signature from this class
(`hocket.signatures`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final, get_args

from torch import nn

from hocket.errors import ConfigError
from hocket.freeze.policy import Policy
from hocket.freeze.settings import Cache, text_of, type_faults
from hocket.freeze.shapes import Balance
from hocket.model.trace.state import (
    State,
    model_fault,
    refuse_no_values,
)
from hocket.model.weights.fresh import FreshWeights
from hocket.model.weights.given import GivenWeights
from hocket.options import (
    CAPTURED_STEP,
    ScheduleOptions,
    fixed_cut_faults,
    sharding_faults,
)
from hocket.run.cluster.world import World
from hocket.run.comm.transports import TransportName
from hocket.run.data.batch import Microbatch, digest, split_batch
from hocket.run.data.loss import LossFunction, WholeBatch, loss_fault
from hocket.run.device.memory import memory_bytes
from hocket.run.diagnostics.startup import StartupHook, StartupProgress
from hocket.run.engine.plan import short_hash
from hocket.run.fill.settings import Fill, fill_faults
from hocket.run.tune.teachers.teacher import Teacher, teacher_faults
from hocket.run.weights.settings import TrainingConfig
from hocket.signatures import values_of

_WITH_FREEZE: Final = {
    "shapes": None,
    "recut": True,
    "num_run_steps": None,
    "cache": None,
}
_FOLDER: Final = (str | PathLike | None, "give the path of a folder")
_YES_OR_NO: Final = (bool, "it must be True or False")
_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "weights": (
        str | Path | FreshWeights | GivenWeights | None,
        "give a folder of safetensors, one such file, a checkpoint, or "
        "hocket.init(seed)",
    ),
    "progress": (Callable | None, "give a function of what is done, such as print"),
    "seed": (int, "it must be a whole number"),
    "compile": _YES_OR_NO,
    "recut": _YES_OR_NO,
    "teacher_lane": _YES_OR_NO,
    "profile_dir": _FOLDER,
    "run_dir": _FOLDER,
    "world": (World | None, "give what hocket.join_world() returns, or leave it out"),
    "teachers": (Mapping, "give hocket.Teacher(net)s by name, in a dict"),
}


@dataclass(frozen=True, slots=True)
class PipelineConfig(TrainingConfig, ScheduleOptions):
    """The arguments of `hocket.Pipeline`, together with those of its base classes.

    Args:
        model: any module; each worker keeps its stages of it and trains them in place.
            It may be parallelised over a tp axis (DTensors).
            Nothing else of it is kept: if the user keeps no reference, the weights of
            the other workers' stages are freed.
        loss: `loss(output, targets)` returns the mean over a microbatch's samples, as a
            scalar tensor or a dict of named ones (see `hocket.run.data.loss`). A mean
            over targets that count (`ignore_index`, class weights) is exact as
            `hocket.TokenMean(loss)`. One that compares samples is refused where batches
            are cut, unless it is given as `hocket.WholeBatch(loss)`, which computes it
            over the batch, or as `hocket.PerMicrobatch(loss)`. Weights of its own that
            want a gradient (of a loss that is a module, or of modules that a function
            reaches) are trained as a part of the last stage, and saved with the buffers
            that it changes, named `loss.` and their name in it. What it reads beside
            the output and its own weights is refused where it would be another value
            than in a plain loop.
        example: a batch `(inputs, targets)` as the loader will give them. The inputs
            are a tensor, a tuple of positional or a dict of keyword arguments.
        weights: for a model that was made under `torch.device("meta")`: a folder of
            safetensors, one such file, a checkpoint that a pipeline has saved, or
            `hocket.init(seed)`. Each worker reads, or draws, the weights of its own
            stages. Files may be given for any other model, too.
        profile_dir: the folder in which profiles are kept and found again.
        seed: the seed of random numbers in the forward (dropout).
        run_dir: the folder for reports of failures; `hocket.launch` sets it. Under
            torchrun it is the current folder when not given.
        transport: what carries messages between workers: "shared-memory" (on one host),
            "torch" (torch.distributed: gloo or NCCL), or "auto", which uses the first
            wherever it can.
        teachers: nets without backwards, by name, whose outputs the loss reads:
            `loss(output, targets, teachers)`, where `teachers[name].own` are a
            teacher's outputs of the same samples. Their forwards go where the order of
            the student would wait.
        freeze: freezes layers while training runs, such as `hocket.freeze.Alpha(1 / 5)`
            at the ends of epochs.
        shapes: with `freeze`: the stages and replicas from so many frozen layers on,
            such as `{4: (2, 2), 6: (1, 4)}`; `{}` keeps the first shape. The fastest
            that fits `memory_bytes`, as predicted, when not given.
        balance: with `freeze`: how stages are cut: "exact" makes the slowest device
            the fastest possible, by measured seconds; "greedy" is PipeTransformer's
            rule, by parameters, which also takes half the stages each time where
            `shapes` is not given.
        recut: with `freeze`: whether layers change their devices when others freeze.
            If not, each stays where it is: frozen layers spread over as many devices
            as before, run forward only, and the shape stays.
        num_run_steps: with `freeze`: the steps of the whole run, over which another
            layout must save more than the change takes. Without it they are counted to
            the end of the loader, or to the next decision where that is later.
        cache: with `freeze`: keeps the frozen layers' outputs of each sample, so that
            they are not computed again; the loader must be a `hocket.SampleLoader`.
        fill: inference with another net over its own samples, in the waits of the
            devices, such as `hocket.Fill(net.eval(), samples, on_output)`.
        teacher_lane: whether the teachers' forwards run in a second lane of each
            device, beside the student, and not in its waits: a thread on a CPU, a
            stream of lower priority on a GPU. For one device, whose only lane never
            waits.
        world: the job, if it is joined already (several pipelines in one job).
        progress: called on rank 0 with a `hocket.StartupProgress` while the pipeline is
            made, if that takes longer than two seconds: at each new activity, and every
            few seconds, from another thread. The logger `hocket` gets the same lines
            (INFO); without a hook and without logging set up, stderr has them. If it
            fails, that is logged, and it is not called again.

    Raises:
        ConfigError: an option is not valid, or has no effect; names all such options.
    """

    model: nn.Module = field(repr=False, compare=False)
    loss: LossFunction
    _: KW_ONLY
    example: Any = field(repr=False, compare=False)
    weights: str | Path | FreshWeights | GivenWeights | None = None
    profile_dir: str | Path | None = None
    seed: int = 0
    run_dir: str | Path | None = None
    transport: TransportName = "auto"
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    freeze: Policy[Any] | None = None
    shapes: Mapping[int, tuple[int, int]] | None = None
    balance: Balance = "exact"
    recut: bool = True
    num_run_steps: int | None = None
    cache: Cache | None = None
    fill: Fill | None = None
    teacher_lane: bool = False
    world: World | None = None
    progress: StartupHook | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        fault = model_fault(self.model, parallel=True)
        faults = [x for x in (fault, loss_fault(self.loss)) if x]
        faults += (
            f"{name} is {value!r:.60}: {what}"
            for name, (kind, what) in _KINDS.items()
            if not isinstance(value := getattr(self, name), kind)
        )
        if self.transport not in (names := get_args(TransportName)):
            faults.append(
                f"transport is {self.transport!r}: it may be {', '.join(names)}"
            )
        if faults:  # the others read their attributes
            raise ConfigError("; ".join(faults))
        faults += teacher_faults(self.teachers, self.model, self.loss)
        if self.teachers and self.max_delay:
            faults.append(
                f"max_delay {self.max_delay} has no effect with teachers: their "
                "forwards fill an order that ends each step before the next begins"
            )
        if self.weights is not None and self.freeze is not None:
            faults.append(
                "weights= does not go together with freeze: load them into the model "
                "before the pipeline is made"
            )
        if self.teacher_lane and not self.teachers:
            faults.append("teacher_lane has no effect without teachers")
        faults += fill_faults(self.fill, self.model, freezes=self.freeze is not None)
        faults += self._freezing_faults()
        used = {
            "freeze": self.freeze is not None,
            "fill": self.fill is not None,
            "teacher_lane": self.teacher_lane,
        }
        faults += self._parallel_faults(used)
        faults += sharding_faults(
            self, [name for name, is_used in used.items() if is_used]
        )
        if text := "; ".join(faults):
            raise ConfigError(text)

    def _parallel_faults(self, beside: Mapping[str, bool]) -> Iterator[str]:
        """Yield what DTensors do not go together with, in one sentence."""
        nets = {f"teachers[{name!r}]": x for name, x in self.teachers.items()}
        for name, has_net in {**nets, "fill": self.fill}.items():
            net = getattr(has_net, "net", None)
            if isinstance(net, nn.Module) and (fault := model_fault(net)):
                yield f"{name}: {fault}"
        if not model_fault(self.model):
            return
        used = {
            **beside,
            "num_shards": self.num_shards > 1,
            "max_delay": self.max_delay,
            "weights": self.weights is not None,
            "compile": self.compile,
            f"schedule {self.schedule!r}": self.schedule in ("auto", CAPTURED_STEP),
            f"precision {self.precision!r}": self.precision == "float16"
            or self.compute_precision.has_masters,
        }
        if found := [name for name, is_used in used.items() if is_used]:
            yield (
                "a model with DTensors (parallelize_module, a tp_plan) does not go "
                f"together with {', nor with '.join(found)}: leave it out, or give the "
                "model as it was before"
            )

    def _freezing_faults(self) -> Iterator[str]:
        freezes = self.freeze is not None
        if self.balance not in get_args(Balance):
            yield f"balance {self.balance!r} should be 'exact' or 'greedy'"
        elif self.balance == "greedy" and not freezes:
            yield "balance 'greedy' has no effect without freeze"
        if not freezes:
            for name, plain in _WITH_FREEZE.items():
                if getattr(self, name) is not plain:
                    yield f"{name} has no effect without freeze"
            return
        yield from type_faults(self.freeze, self.shapes, self.num_run_steps, self.cache)
        if self.compute_precision.has_masters:
            yield (
                f"precision {self.precision!r} does not go together with freeze: "
                "another layout moves weights, and not their masters; take 'bfloat16'"
            )
        if not self.recut:
            yield from fixed_cut_faults(
                shapes=bool(self.shapes), caches=self.cache is not None
            )

    def report(
        self, what: str, num_done: int | None = None, num_all: int | None = None
    ) -> None:
        """Report what is done before the first step (`run/diagnostics/startup.py`).

        Args:
            what: the activity.
            num_done: how much of it is done, if it is counted.
            num_all: how much there is.
        """
        if self.progress is not None:
            self.progress(StartupProgress(what, num_done=num_done, num_all=num_all))

    @property
    def freezing_texts(self) -> dict[str, str]:
        """Text of each option of freezing, which all workers must have alike."""
        names = ("freeze", "balance", *_WITH_FREEZE)
        return {name: text_of(getattr(self, name)) for name in names}

    @property
    def num_parts(self) -> int:
        """The number of microbatches in a batch, over all replicas and shards."""
        return self.num_microbatches * self.num_pipelines

    @property
    def whole_batch(self) -> bool:
        """Whether the loss is over the whole batch (op L)."""
        return isinstance(self.loss, WholeBatch)

    @property
    def training(self) -> TrainingConfig:
        """How parameters are updated; holds no reference to the model."""
        return TrainingConfig(**values_of(TrainingConfig, self))

    def memory_of(self, world: World) -> int:
        """Return the bytes for tensors on each device: as asked, or as there are.

        Every worker must call this, and gets the same number.
        """
        return self.memory_bytes or memory_bytes(world)

    def refuse_no_values(self) -> None:
        """Refuse models without weights, where none are given.

        Raises:
            ConfigError: parameters or buffers are on the meta device, or parameters
                in the shards of another pipeline.
        """
        if self.weights is None:
            how = 'weights="a folder of safetensors" or weights=hocket.init(seed=0)'
            refuse_no_values(
                self.model,
                "the model",
                f"give them, {how}; `hocket.plan` takes it as it is",
            )
        nets = {f"the teacher {name}": x.net for name, x in self.teachers.items()}
        if self.fill is not None:
            nets["the net of fill"] = self.fill.net
        for what, net in nets.items():
            why = "weights= is for the model alone: make it elsewhere"
            refuse_no_values(net, what, why)

    @property
    def is_partial(self) -> bool:
        """Whether a worker holds the weights of some layers alone."""
        return isinstance(self.weights, GivenWeights) and self.weights.is_partial

    def text_of_weights(self, state: State) -> str:
        """Return a text of all weights, which all workers must have alike.

        Args:
            state: the model's.
        """
        if isinstance(self.weights, GivenWeights):
            return f"{short_hash(self.weights.text)} {digest(self.weights.others):08x}"
        return f"{digest(dict(state.tensors)):08x}"

    def hold(self, names: Collection[str]) -> None:
        """Let this worker hold these of the weights that are given, and no others.

        Args:
            names: first names.
        """
        if isinstance(self.weights, GivenWeights):
            self.weights.hold(names)

    def microbatches(self) -> tuple[Microbatch, ...]:
        """Return the microbatches of the example.

        Raises:
            DataError: the example is no batch, or has too few samples.
        """
        return split_batch(self.example, self.num_parts)
