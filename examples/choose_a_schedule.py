"""Compare schedules before renting a GPU: no torch, no device, under a second.

python examples/choose_a_schedule.py
"""

from __future__ import annotations

import hocket


def main() -> None:
    """Print what four devices would do with eight microbatches."""
    costs = hocket.Costs.uniform(
        forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, message_s=0.1
    )
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"):
        schedule = hocket.make_schedule(name, num_devices=4, num_microbatches=8)
        proof = hocket.check(schedule)
        timeline = hocket.simulate(schedule, costs)
        print(
            f"{name:<18} {timeline.makespan_s:6.2f} s   "
            f"bubble {timeline.bubble_fraction:5.1%}   "
            f"peak activations {timeline.peak_activations(device=0):4.1f}   "
            f"receive buffers {proof.num_buffers}"
        )


if __name__ == "__main__":
    main()
