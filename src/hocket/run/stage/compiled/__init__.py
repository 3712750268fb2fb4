"""Compiles stages before the first step, as three graphs: F, I and W.

    stage ──▶ trace ──▶ one graph of forward and backward, without side effects
                              │ forward | backward: torch's partitioner, which decides
                              ▼                     what F keeps, and what B makes again
                    F  ───────────────────▶ B
                    │                       │ cut by what needs what
                    │ kept for I and W      ▼
                    └────────────▶ I ──────────────▶ W
                                    kept for W alone

Each graph is compiled by Inductor, for the sizes of the example's microbatches.
Other sizes (a smaller last microbatch) run uncompiled.

    graphs.py       graphs of operators, and parts of them
    inputs.py       what a stage is called with, as tensors
    trace.py        forward and backward in one graph
    functional.py   that graph without side effects
    traceable.py    whether a module's own code may be fixed in a graph
    containers.py   what modules keep in lists, dicts and sets
    divide.py       operators that make both gradients at once, in two
    split_backward.py  which nodes are I's and which W's, and what is held between
    lower.py        Inductor
    products.py     gradients that are products, added up by these
    capture.py      all graphs of a stage for one size
    trial.py        run them once and compare
    function.py     what a stage calls in place of its own code, and its place in
                    autograd's graph
    remainder.py    what I leaves for W
    splitter.py     how the runtime asks for I and W
    (run/tune/compile_stages.py compiles all of a worker's stages)
"""
