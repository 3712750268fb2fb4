"""What a pipeline decided before its first step: cut, schedule, costs, prediction."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hocket.core.costs import Costs
from hocket.core.schedule import Schedule
from hocket.core.timelines.timeline import Timeline
from hocket.draw.quantity import byte_size, counted, percent, seconds
from hocket.model.profile.profile import Profile
from hocket.model.trace.example import Example


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What will run, and how long it should take.

    Args:
        boundaries: the layers at which stages 1, 2, ... of the model begin.
        stage_names: the first layer of each stage of the schedule; of a teacher's
            stages, which come first, behind the teacher's name.
        state_names: the names that each stage has of the pipeline's `state_dict()`;
            none for a frozen teacher's.
        example: what the model was captured with; batches must have its form.
        schedule_name: asked for or chosen, or the path of the order's file; empty
            where the order itself was given.
        schedule: one step; or several, where they overlap, with a body to repeat.
        profile: the costs of each layer of the model, as measured.
        costs: each stage's and message's.
        predicted: the simulated timeline of the schedule.
        frozen_s: seconds of each layer's forward once it is frozen, in eval mode and
            without gradients; none where no layer may freeze.
    """

    boundaries: tuple[int, ...]
    stage_names: tuple[str, ...]
    state_names: tuple[tuple[str, ...], ...]
    example: Example
    schedule_name: str
    schedule: Schedule
    profile: Profile
    costs: Costs
    predicted: Timeline
    frozen_s: tuple[float, ...] = ()

    def __repr__(self) -> str:
        """Return one line; `str` describes each device."""
        name = self.schedule_name or "a given order"
        return f"<hocket.Plan {name} with {self.predicted!r}>"

    def _repr_html_(self) -> str:
        from hocket.draw.html.page import html_card

        return html_card(self.predicted, title="predicted", text=str(self))

    def __str__(self) -> str:
        """Describe the order, each device's stages and memory, and the prediction."""
        program, predicted = self.schedule.program, self.predicted
        lines = [
            f"{self.schedule_name or 'a given order'}: "
            f"{counted(program.num_stages, 'stage')} on "
            f"{counted(program.num_devices, 'device')}, "
            f"{counted(program.nets[-1].num_microbatches, 'microbatch')}"
        ]
        for device, stages in enumerate(program.stages_on):
            begins = ", ".join(f"{i} ({self.stage_names[i]})" for i in stages)
            peak = byte_size(predicted.peak_bytes(device))
            noun = "stage" if len(stages) == 1 else "stages"
            lines.append(f"  device {device}: {noun} {begins}; {peak} at most")
        bubble = (
            predicted.steady_bubble_fraction
            if self.schedule.body
            else predicted.bubble_fraction
        )
        lines.append(
            f"predicted: {seconds(predicted.step_s)} a step, bubble {percent(bubble)}"
        )
        return "\n".join(lines)

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """The names of the model's stages that run forward only."""
        program = self.schedule.program
        model = program.nets[-1].name
        stages = zip(program.stages, self.state_names, strict=True)
        return tuple(
            name
            for stage, names in stages
            if stage.net == model and not stage.trainable
            for name in names
        )

    @property
    def digest(self) -> str:
        """Equal for equal plans; workers compare theirs."""
        recomputes = [cost.recomputes for cost in self.costs.stages]
        return short_hash(f"{self.stage_names}\n{self.schedule}\n{recomputes}")


def short_hash(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
