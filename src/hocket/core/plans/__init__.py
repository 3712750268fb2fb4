"""What the runtime looks up in a schedule before it plays it.

`lane_plan.py` plans waits, messages and buffers around each op, and cuts an order that
repeats; `message_order.py` orders the messages of links with one queue.
Imports the other modules of `core`, but not `checker` and `simulator`. Begin with
`lane_plan.py`.
"""
