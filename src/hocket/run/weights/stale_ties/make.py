"""Give the stages of one worker what they may read: own, lent and borrowed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from hocket.core.program import Program
from hocket.run.cluster.layout import Layout
from hocket.run.comm.transport import Channel, Receiver, Sender, Transport
from hocket.run.stage.runner import StageRunner
from hocket.run.stage.versions import Source, Versions
from hocket.run.weights.stale_ties.borrowed import Borrowed
from hocket.run.weights.stale_ties.lent import Lent
from hocket.run.weights.stale_ties.loan import Loan
from hocket.run.weights.stale_ties.loans import Loans
from hocket.run.weights.stale_ties.neighbour import OfNeighbour

# What forwards of the newest weights should read in their place, by name.
Predict = Callable[[], Mapping[str, Tensor] | None]


def give_versions(
    runners: Mapping[int, StageRunner],
    program: Program,
    loans: Sequence[Loan],
    predict: Mapping[int, Predict],
    layout: Layout,
    transport: Transport,
) -> Loans:
    """Give each stage its versions, where it reads old weights. Every worker must call.

    Args:
        runners: of this worker's stages.
        program: says their delays.
        loans: all of the model, in order of name.
        predict: of each stage, where forwards read predicted weights; or empty.
        layout: who is where.
        transport: carries gradients and values.

    Returns:
        What is done about the weights that stages share.
    """
    ends: dict[str, tuple[list[Receiver], list[Sender]]] = {}
    borrowed: dict[str, Borrowed] = {}
    for loan in loans:  # both ends of a channel are made in one order on all workers
        if layout.device == loan.devices[0]:
            ends[loan.name] = _lending_ends(loan, layout, transport)
        elif layout.device in loan.devices:
            borrowed[loan.name] = _borrowed(
                loan, runners, layout, transport, predicts=bool(predict)
            )
    lent: dict[str, Lent] = {}
    for number, runner in sorted(runners.items()):  # who lends comes first
        sources: dict[str, Source] = {
            loan.name: _source(loan, number, runners, borrowed.get(loan.name))
            for loan in loans
            if number in loan.stages[1:]
        }
        delay = program.stages[number].delay
        if not delay and not sources:
            continue
        versions = Versions(runner.module, delay, predict.get(number), sources)
        runner.versions = versions
        for loan in loans:
            if loan.stages[0] == number:
                lent[loan.name] = Lent(
                    loan.name,
                    runner.parameters[loan.name],
                    versions,
                    *ends[loan.name],
                    predicts=bool(predict),
                )
    return Loans(loans, lent, borrowed, runners.keys())


def _lending_ends(
    loan: Loan, layout: Layout, transport: Transport
) -> tuple[list[Receiver], list[Sender]]:
    """From and to each of the other devices."""
    gradients, values = [], []
    for device in loan.devices[1:]:
        to_owner, from_owner = _channels(loan, layout, device)
        gradients.append(transport.receiver(to_owner))
        values.append(transport.sender(from_owner))
    return gradients, values


def _borrowed(
    loan: Loan,
    runners: Mapping[int, StageRunner],
    layout: Layout,
    transport: Transport,
    *,
    predicts: bool,
) -> Borrowed:
    to_owner, from_owner = _channels(loan, layout, layout.device)
    stage = next(stage for stage in loan.stages if stage in runners)
    return Borrowed(
        loan.name,
        loan.delay,
        runners[stage].parameters[loan.name],
        transport.sender(to_owner),
        transport.receiver(from_owner),
        predicts=predicts,
    )


def _channels(loan: Loan, layout: Layout, device: int) -> tuple[Channel, Channel]:
    """To the device that updates the weight, from another one, and back."""
    owner, other = layout.ranks[loan.devices[0]], layout.ranks[device]
    return (
        Channel(f"gradient of {loan.name}", other, owner),
        Channel(f"values of {loan.name}", owner, other),
    )


def _source(
    loan: Loan,
    stage: int,
    runners: Mapping[int, StageRunner],
    borrowed: Borrowed | None,
) -> Source:
    """What a stage reads: stages of one device have the same."""
    if borrowed is None:
        versions = runners[loan.stages[0]].versions
        assert versions is not None, "refuse_shared: it has a delay"
        return OfNeighbour(loan.delay, partial(versions.read, loan.name))
    first = next(number for number in loan.stages if number in runners)
    return borrowed if stage == first else OfNeighbour(loan.delay, borrowed.read)
