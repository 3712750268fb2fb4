"""The forms of batches that a net's stages are right for, and what is said of others.

captured with 8 texts of 5 words    a batch of 7 words: captured again, for any
a batch of 6: runs at once

captured with task="a"              a batch of task="b": captured again for it
task="a" again: its graph is kept
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

from hocket.errors import ModelError
from hocket.model.capture.captured import Captured
from hocket.model.stages.recut import Placed
from hocket.model.trace.example import Example, Form

log = logging.getLogger(__name__)

_MOST: Final = 8  # graphs, of code that decides by forms

CaptureAgain: TypeAlias = Callable[[Example], Placed]


class KnownForms:
    """The forms that a captured model is right for, and its graphs for others.

    Args:
        now: the model as its code is now.
    """

    def __init__(self, now: Placed) -> None:
        self._kept = [now]
        self._take(now, now.captured.example.form)

    def _take(self, now: Placed, form: Form) -> Placed:
        self._known = {form.lengths}
        self._values = now.captured.example.form.values
        return now

    def covers(self, captured: Captured, form: Form) -> bool:
        """Whether a captured model is right for a batch of this form."""
        example, lengths = captured.example, form.lengths
        if form.values != self._values and example.fault_of_values(form):
            return False
        if lengths not in self._known:
            is_own = lengths == example.form.lengths
            is_open = captured.training.trace.open.is_any  # to all that modules take
            if (is_open and not is_own) or _fault(captured, form):
                return False
            self._known.add(lengths)
        return True

    def follow(
        self,
        now: Placed,
        form: Form,
        step: int,
        try_with: Callable[[Example], object],
        capture_again: CaptureAgain,
        check: Callable[[Placed], None],
    ) -> Placed | None:
        """Find whether a model takes batches of a form that is not covered.

        Args:
            now: the model.
            form: a batch's.
            step: its step, for errors.
            try_with: runs the model with an example, where modules run as they are.
            capture_again: captures the model with an example; raises ModelError if its
                stages cannot be what they are.
            check: raises ModelError if a graph that was kept no longer serves.

        Returns:
            The model as it is captured now; None if it stays as it is.

        Raises:
            ModelError: it does not take them; nothing has changed.
        """
        right = (x for x in (now, *self._kept) if not _fault(x.captured, form))
        try:
            if (found := next(right, None)) is None:
                found = self._captured(now, form, capture_again)
                self._kept.append(found)
            elif found is not now:
                check(found)
            if found.captured.training.trace.open.is_any:
                try_with(found.captured.example.at(form.lengths))
        except Exception as error:  # whatever the model's code raises
            text = _other_form(now.captured, form, step, str(error))
            raise ModelError(text) from error
        if found is now:
            self._known.add(form.lengths)
            return None
        return self._take(found, form)

    def _captured(self, now: Placed, form: Form, capture_again: CaptureAgain) -> Placed:
        """Capture the model for a form, and for as many others as it can.

        Raises:
            ModelError: it cannot be; says why.
        """
        if len(self._kept) == _MOST:
            why = _fault(now.captured, form)
            raise ModelError(f"{why}, and {_MOST} graphs of it are kept already")
        faults: list[Exception] = []
        for example in _examples(now.captured.example, form):
            log.info("capturing the model for batches of another form: %s", form)
            try:
                found = capture_again(example)
            except Exception as error:
                faults.append(error)
            else:
                if not (why := _fault(found.captured, form)):
                    return found
                faults.append(ModelError(why))
        # Of numbers the last try is the plain one; of lengths the first says most.
        raise faults[-1 if now.captured.example.fault_of_values(form) else 0]


def _examples(own: Example, form: Form) -> Iterator[Example]:
    """Yield examples to capture a model with, those for most other forms first."""
    sizes = own.sizes(own.form.lengths)
    differ = {
        place: size
        for place, size in own.sizes(form.lengths).items()
        if size != sizes.get(place)
    }
    example = replace(own.with_values(form), open={**own.open, **differ})
    numbers = own.with_values(form, as_tensors=True)
    if numbers.form.values != example.form.values:
        yield replace(numbers, open=example.open)
    yield example
    if example.open:  # of a size that differs now, or did before
        yield own.with_values(form).at(form.lengths)


def _fault(captured: Captured, form: Form) -> str:
    """Return why a captured model is not right for a form."""
    example = captured.example
    if len(example.leaves) != len(form.lengths):
        return "it reads another net's outputs"
    sizes, own = (example.sizes(x) for x in (form.lengths, example.form.lengths))
    for flow in (captured.training, captured.evaluation):
        if fault := flow.trace.open.fault(sizes, own, example.names):
            return fault
    return example.fault_of_values(form)


def _other_form(captured: Captured, form: Form, step: int, why: str) -> str:
    """Return the text of an error: a batch cannot be followed."""
    example = captured.example
    if fault := example.fault_of_values(form):
        return (
            f"at step {step} the model cannot be captured for the numbers and texts of "
            f"a batch ({fault}): {why}. Give a number as a tensor of no dimensions, or "
            "put the code that it decides into a submodule"
        )
    differ = ", ".join(
        f"{name} has {shape} behind its samples, and the example {own}"
        for name, shape, own in zip(
            example.names, form.lengths, example.form.lengths, strict=False
        )
        if shape != own
    )
    return (
        f"at step {step} a batch has other lengths than the example ({differ}), and "
        f"the model cannot take both: {why}. Pad all batches to one length, "
        "or give an nn.Sequential, whose modules run as they are"
    )
