"""The weights that a pipeline is given beside its model.

    with torch.device("meta"): model = Net()          no memory, no values
    Pipeline(model, ..., weights="folder/")           each worker reads its own stages

While layers are measured, one after the other holds its values; then the stages of
this worker do.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from hocket.errors import ConfigError, ModelError
from hocket.model.stages.saved_modules import SavedModules
from hocket.model.trace.state import State
from hocket.model.weights.converted import as_the_model_names_them
from hocket.model.weights.fresh import FreshWeights, draw, refuse_unset
from hocket.model.weights.hollow import make_hollow
from hocket.model.weights.stored import StoredWeights


class GivenWeights:
    """A model's weights, which come from files or are drawn.

    Args:
        model: the model; of what is on `meta`, the memory is on the host from now on,
            and takes none until it is written. All parameters stay the same objects.
        source: where the values come from.

    Raises:
        ModelError: the files do not fit the model, or a tensor stays without values.
        ConfigError: the model cannot be given any.
    """

    def __init__(self, model: nn.Module, source: StoredWeights | FreshWeights) -> None:
        self._model, self._source = model, source
        self._names: dict[str, tuple[str, ...]] = {}
        if isinstance(source, StoredWeights):
            source = as_the_model_names_them(source, model)
            self._source, self._names = source, source.names_for(State.of(model))
            _load_beside(model, source)
        self._hollow = make_hollow(model)
        if isinstance(source, FreshWeights) and not self._hollow:
            raise ConfigError(
                "weights=hocket.init() has no effect: no tensor of the model is on the "
                'meta device; make it under `with torch.device("meta")`'
            )
        self._held: frozenset[str] = frozenset()
        self._tensors = State.of(model).tensors
        self._compute()

    @property
    def is_partial(self) -> bool:
        """Whether tensors have no values until they are held."""
        return bool(self._hollow)

    @property
    def text(self) -> str:
        """A text of where they come from, which all workers must have alike."""
        if isinstance(self._source, FreshWeights):
            is_made = self._source.like is not None
            return f"seed {self._source.seed}, as a constructor {is_made}"
        return str(sorted(self._source.forms.items()))

    @property
    def others(self) -> dict[str, Tensor]:
        """The tensors whose values are the user's own, by first name."""
        given = self._names.keys() | self._hollow.keys()
        return {name: x for name, x in self._tensors.items() if name not in given}

    def hold(self, names: Collection[str]) -> None:
        """Give these tensors their values, and take the memory of all others.

        Args:
            names: first names; what the model does not have is left out.
        """
        is_drawn = isinstance(self._source, FreshWeights)
        wanted = frozenset(names) & (self._hollow if is_drawn else self._names).keys()
        for name in self._held - wanted:
            if name in self._hollow:
                self._hollow[name].release()
        new = wanted - self._held
        if new and isinstance(self._source, StoredWeights):
            self._source.fill({x: self._tensors[x] for x in sorted(new)}, self._names)
        elif new and isinstance(self._source, FreshWeights):
            own = {name: self._tensors[name] for name in sorted(wanted)}
            self._source.fill(self._model, own, self.others)
            for name in self._hollow.keys() - wanted:  # a whole may draw its parts
                self._hollow[name].release()
        self._held = wanted

    def forget(self) -> None:
        """Let go of what is needed for other stages alone."""
        if isinstance(self._source, FreshWeights):
            self._source.forget()

    def _compute(self) -> None:
        """Let modules compute buffers that are not saved, such as tables of angles.

        Raises:
            ModelError: one is not computed.
        """
        if not isinstance(self._source, StoredWeights):
            return
        unset = {x: self._tensors[x] for x in self._hollow if x not in self._names}
        owners = {name.rpartition(".")[0] for name in unset}
        still = draw(self._model, unset, 0, self.others, owners)
        refuse_unset(still, self._model, by_all=False)
        for name in self._hollow.keys() - unset.keys():
            self._hollow[name].release()


def _load_beside(model: nn.Module, source: StoredWeights) -> None:
    """Load what modules save beside tensors.

    Raises:
        ModelError: the files lack an extra state; or a module has hooks of loading,
            which see a whole state dict.
    """
    for path, module in model.named_modules():
        if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
            raise ModelError(
                f"{path or 'the model'} has a hook of load_state_dict, and no worker "
                f"of {source.where} has the state dict that it is called with: load "
                "the weights into the model before the pipeline is made"
            )
    modules = SavedModules({"": model})
    if missing := sorted(modules.extra_names - source.extra.keys()):
        raise ModelError(
            f"{source.where} has no {missing[0]}: an extra state (`get_extra_state`) "
            "is in checkpoints of hocket alone; load the weights into the model before "
            "the pipeline is made"
        )
    modules.load(source.extra)
