"""The order of all messages of a device, for links that pair messages by their order.

Each portion is planned by itself, since ranks do not know how often a body is played:
what is sent in a portion is received in it. So no op may wait in a portion for what
another device does in a later one.
"""

from __future__ import annotations

from hocket.core.checker.links import check_queues
from hocket.core.gates import gates_of
from hocket.core.op import Op
from hocket.core.plans.message_order import Queue, ops_together, plan_queues
from hocket.errors import DeadlockError, RunError
from hocket.run.engine.lanes.play_plan import PlayPlan, Portion, PortionPlan


def refuse_unordered(plan: PlayPlan) -> None:
    """Refuse what has no planned order of messages.

    Raises:
        RunError: a device has several lanes; or an update waits for gradients that
            another device makes in a later portion.
    """
    num_devices = plan.program.num_devices
    if len(plan.schedule.lanes) > num_devices:
        raise RunError(
            f"this schedule has {len(plan.schedule.lanes)} lanes on {num_devices} "
            "devices, and NCCL needs one order of a device's messages: choose a "
            "schedule with one lane for each device, or send by way of the host "
            "(HOCKET_BACKEND=gloo)"
        )
    played: set[Op] = set()
    for portion in (Portion.PROLOGUE, Portion.BODY):
        if portion not in plan.portions:
            return
        ops = [one for lane in plan.portions[portion].lanes for one in lane]
        played.update(one.op for one in ops)
        for one in ops:
            for other in one.follows:
                if other not in played:
                    raise _refusal(f"{one.op} waits for {other} of a later portion")


def plan_messages(plan: PlayPlan, part: PortionPlan) -> dict[int, Queue]:
    """Plan and prove the order of a portion's messages.

    An update may wait for gradients that another device reduces only in its own update
    (replicas, shared weights). The plan assumes this of every update first. If that
    deadlocks, the plan assumes that gradients are complete after their backwards.

    Raises:
        RunError: replicas reduce gradients, and no order ends with updates that wait.
        DeadlockError: no order ends, even if updates wait for no other device.
        ScheduleError: the planned order differs at the two ends of a pair.
    """
    devices = [lane.device for lane in plan.schedule.lanes]
    gates = gates_of(plan.schedule, clips=True)
    together = ops_together(plan.program, gates)
    try:
        queues = plan_queues(part.lanes, devices, together)
    except DeadlockError as error:
        if plan.program.num_replicas > 1 and plan.gates == gates:
            raise _refusal(str(error)) from error
        together = ops_together(plan.program)
        queues = plan_queues(part.lanes, devices, together)
    check_queues(queues, together)
    return queues


def _refusal(reason: str) -> RunError:
    return RunError(
        "updates of this schedule wait for gradients of other devices, and no order of "
        f"messages over NCCL is proved to end ({reason}): do not clip by the norm, or "
        "send by way of the host (HOCKET_BACKEND=gloo)"
    )
