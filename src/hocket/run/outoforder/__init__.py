"""One device, out of order: a whole training step as one graph, on two lanes.

    capture/      model + loss ──▶ graph of forward and backward ──▶ units, regions
    order/        costs and memory of the regions ──▶ orders, and the fastest of them
    play/         plays an order in the lanes of a device, and frees what it made

Weight gradients, which no other gradient waits for, run beside the critical path.
Imports `engine` and what is before it. Begin with `compile_step.py`.
"""
