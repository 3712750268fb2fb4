"""The law's table: what a plain loop can see, and each public name of `nn.Module`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of what a plain loop can see.

    Args:
        what: the kind.
        answer: "followed", "refused", or both with what is which.
        how: what the pipeline does; of a refusal, why and what to do instead.
        file: the module of `cases` that holds its cases; none if empty.
    """

    what: str
    answer: str
    how: str
    file: str = ""


ROWS: Final = (
    Row(
        "plain attributes of modules: numbers, flags, functions, settings objects",
        "followed",
        "Each step compares them with those of the captured graph.",
        "attributes",
    ),
    Row(
        "numbers and functions outside of the module; submodules and forwards replaced",
        "followed",
        "Each step compares them with those of the captured graph.",
        "outside",
    ),
    Row(
        "submodules in lists and tables: exchanged, added, removed, reordered",
        "followed, but for weights",
        "Each step compares which modules there are, and in which order. Weights that "
        "come, go or get another name are refused: the optimizer and checkpoints are "
        "made for what was there.",
        "membership",
    ),
    Row(
        "`.train()` and `.eval()` of the model and of submodules",
        "followed",
        "Each step reads the mode of each module.",
        "modes",
    ),
    Row(
        "`requires_grad` changed between two steps",
        "followed, but for what was frozen when the pipeline was made",
        "A parameter that is frozen gets no gradient. Make the pipeline while all is "
        "trained that ever will be, and freeze it before the first step. Not beside "
        "`freeze=`, and not where old weights are kept.",
        "modes",
    ),
    Row(
        "hooks of modules, parameters and tensors",
        "followed",
        "Modules are called with their hooks.",
        "hooks",
    ),
    Row(
        "weights and buffers that the loop changes in place, or loads",
        "followed",
        "Stages have the user's own tensors. Change them alike on every worker.",
        "weights",
    ),
    Row(
        "another type of weights and inputs between two steps",
        "refused",
        "Messages have the types of the example. Make the pipeline again.",
        "weights",
    ),
    Row(
        "random numbers in forwards: torch's, Python's, NumPy's",
        "followed",
        "Drawn anew in each microbatch, seeded by (seed, step, net, module, "
        "microbatch): not the numbers of a loop beside it.",
        "randomness",
    ),
    Row(
        "what a loss reads besides the output, keeps, and returns",
        "followed, or refused on several workers",
        "Weights of the loss are trained as part of the last stage. Weights of other "
        "stages are not where the loss is.",
        "losses",
    ),
    Row(
        "forms of inputs, targets and outputs",
        "followed",
        "Whatever has an entry for each sample is cut. Numbers and texts may differ "
        "from batch to batch. An input's gradient is followed where the stages of one "
        "worker compute all of it.",
        "inputs",
    ),
    Row(
        "batches of other lengths and sizes than the example's",
        "followed, but with `freeze=`",
        "The model is captured once more, for any length; an `nn.Sequential` is not. "
        "Code that does other things at other lengths has up to eight graphs.",
        "lengths",
    ),
    Row(
        "forms of losses and metrics",
        "followed, or refused where samples are compared",
        "A mean over samples; `WholeBatch`, `PerMicrobatch` and `TokenMean` say "
        "what else is meant.",
        "loss_forms",
    ),
    Row(
        "a backward inside of a forward: forces, gradient penalties",
        "followed",
        "In a module of its own; in code between modules that are cut apart refused.",
        "inner_backwards",
    ),
    Row(
        "optimizers, their hooks, learning rates, clipping",
        "followed",
        "Each stage has an optimizer of its own, made by the user's function.",
        "optimizers",
    ),
    Row(
        "which parameters an optimizer has, and since when",
        "followed, or refused",
        "Those that it leaves out are not trained. What is no parameter of the model "
        "or the loss is refused; so is a parameter that is added under way.",
        "optimizer_groups",
    ),
    Row(
        "what modules keep: buffers, extra state, parametrizations",
        "followed",
        "Buffers are the user's own tensors.",
        "state",
    ),
    Row(
        "unusual forwards and kinds of modules",
        "followed",
        "Modules are called as they are wherever the cut allows it.",
        "modules",
    ),
    Row(
        "what a layer hands on beside its output; parameters among the outputs",
        "refused; parameters are followed",
        "Layers may be in other stages, and keep what is another microbatch's. Return "
        "it, and give it as an argument.",
        "skips",
    ),
    Row(
        "the user's own model after training on several workers",
        "followed",
        "`gather_into(model)`; without it, only this worker's stages are trained.",
    ),
    Row(
        "gradients that the loop reads or changes between backward and step",
        "refused",
        "There is no such place: `step()` does both. `clip_norm=`; hooks of parameters "
        "and optimizers.",
    ),
    Row(
        "a second forward or backward of the same batch by the loop",
        "refused",
        "There is no such place. The user's own model may be called between two "
        "steps; on several workers only the stages of this worker are trained in it.",
    ),
)

_FOLLOWED: Final = "followed"
_REFUSED: Final = "refused"
_BETWEEN: Final = "no part of a step: as in the plain loop, between two steps"
_TENSORS: Final = "gives the user's own tensors"
_MODULES: Final = "gives the user's own modules"
_LOADS: Final = "called by `state_dict()`, `load()` and `gather_into()`"
_MOVES: Final = (
    "moves weights before the pipeline is made; another type afterwards is followed by "
    "one stage, and refused where there are several; another device is refused"
)

# Each public name of dir(torch.nn.Module): its answer, and how.
NAMES: Final[dict[str, tuple[str, str]]] = {
    "T_destination": (_FOLLOWED, "a type variable of torch's own annotations"),
    "add_module": (_FOLLOWED, "a module added or replaced under way is seen"),
    "apply": (_FOLLOWED, "changes the user's own tensors, in place"),
    "bfloat16": (_REFUSED, _MOVES),
    "buffers": (_FOLLOWED, _TENSORS),
    "call_super_init": (_FOLLOWED, "matters while the module is made"),
    "children": (_FOLLOWED, _MODULES),
    "compile": (_FOLLOWED, "a compiled module is called as it is"),
    "cpu": (_REFUSED, _MOVES),
    "cuda": (_REFUSED, _MOVES),
    "double": (_REFUSED, _MOVES),
    "dump_patches": (_FOLLOWED, "of torch's own checkpoints"),
    "eval": (_FOLLOWED, "of the model and of each submodule, under way too"),
    "extra_repr": (_FOLLOWED, _BETWEEN),
    "float": (_REFUSED, _MOVES),
    "forward": (_FOLLOWED, "the class's or the object's own, replaced under way too"),
    "get_buffer": (_FOLLOWED, _TENSORS),
    "get_extra_state": (
        _FOLLOWED,
        "tensors, numbers, text, lists, tuples, dicts; anything else is refused when "
        "the pipeline is made",
    ),
    "get_parameter": (_FOLLOWED, _TENSORS),
    "get_submodule": (_FOLLOWED, _MODULES),
    "half": (_REFUSED, _MOVES),
    "ipu": (_REFUSED, _MOVES),
    "load_state_dict": (_FOLLOWED, "on every worker alike, between two steps"),
    "modules": (_FOLLOWED, _MODULES),
    "mtia": (_REFUSED, _MOVES),
    "named_buffers": (_FOLLOWED, _TENSORS),
    "named_children": (_FOLLOWED, _MODULES),
    "named_modules": (_FOLLOWED, _MODULES),
    "named_parameters": (_FOLLOWED, _TENSORS),
    "parameters": (_FOLLOWED, _TENSORS),
    "register_backward_hook": (_FOLLOWED, "torch's old form of the full hook"),
    "register_buffer": (_FOLLOWED, "persistent or not; also in the first forward"),
    "register_forward_hook": (_FOLLOWED, "also added or removed under way"),
    "register_forward_pre_hook": (_FOLLOWED, "also added or removed under way"),
    "register_full_backward_hook": (_FOLLOWED, "also added or removed under way"),
    "register_full_backward_pre_hook": (_FOLLOWED, "also added or removed under way"),
    "register_load_state_dict_post_hook": (_FOLLOWED, _LOADS),
    "register_load_state_dict_pre_hook": (
        _FOLLOWED,
        "called by `gather_into()`; `load()` renames nothing, so none is needed",
    ),
    "register_module": (_FOLLOWED, "as add_module"),
    "register_parameter": (
        _REFUSED,
        "a parameter added or replaced under way has no place in an optimizer",
    ),
    "register_state_dict_post_hook": (_FOLLOWED, _LOADS),
    "register_state_dict_pre_hook": (_FOLLOWED, _LOADS),
    "requires_grad_": (
        _FOLLOWED,
        "under way, too, for what was trained when the pipeline was made",
    ),
    "set_extra_state": (_FOLLOWED, "called when a state is loaded"),
    "set_submodule": (_FOLLOWED, "as add_module"),
    "share_memory": (_FOLLOWED, "tensors stay where they are"),
    "state_dict": (
        _FOLLOWED,
        "`pipeline.state_dict()`; one that a module overrides to save more is refused",
    ),
    "to": (_REFUSED, _MOVES),
    "to_empty": (_REFUSED, _MOVES),
    "train": (_FOLLOWED, "of the model and of each submodule, under way too"),
    "type": (_REFUSED, _MOVES),
    "xpu": (_REFUSED, _MOVES),
    "zero_grad": (_FOLLOWED, "gradients are cleared behind each update"),
}

# What torch.nn.utils changes a module by, and modules that are not ready when made.
KINDS: Final[dict[str, tuple[str, str]]] = {
    "parametrizations": (_FOLLOWED, "called as they are (`register_parametrization`)"),
    "`weight_norm`, `orthogonal`": (_FOLLOWED, "parametrizations"),
    "`spectral_norm`": (_FOLLOWED, "its buffers change in each training forward"),
    "pruned layers": (_FOLLOWED, "a mask in a buffer, and a forward pre-hook"),
    "lazy modules": (
        _REFUSED,
        "until a first forward has made their weights: `model(example)`",
    ),
    "scripted modules": (_REFUSED, "give the module that was scripted"),
}
