"""A schedule of your own: written as text, checked, simulated and drawn.

python examples/write_a_schedule.py
"""

from __future__ import annotations

import hocket
from hocket.draw import to_text

# Two devices, four microbatches: device 1 saves its first two backwards for later.
MINE = """
d0  0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3 0U
d1  1F0 1F1 1B0 1B1 1F2 1B2 1F3 1B3 1U
"""

# The same with a fault: device 0 wants a gradient before it has sent what it needs.
WRONG = """
d0  0F0 0B0 0F1 0B1 0U
d1  1F0 1F1 1B0 1B1 1U
"""


def main() -> None:
    """Prove the one, and read why the other cannot run."""
    schedule = hocket.Schedule.parse(MINE)
    print(hocket.check(schedule))
    print(to_text(hocket.simulate(schedule, hocket.Costs.uniform())))
    try:
        hocket.check(hocket.Schedule.parse(WRONG))
    except hocket.HocketError as error:
        print(error)


if __name__ == "__main__":
    main()
