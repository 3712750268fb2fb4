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

    graph/          graphs of operators, and how they are rewritten
    inputs.py       the tensors that a stage computes with
    trace.py        forward and backward in one graph
    traceable.py    refuses modules whose own code may not be fixed in a graph
    draws.py        the random numbers that a graph draws
    lower.py        Inductor, and gradients that are products, added up by these
    capture.py      the nodes of I and of W, and the values held between; all graphs
                    of a stage for one size
    trial.py        run them once and compare
    function.py     replaces a stage's code, as one node of autograd's graph; W, with
                    the values that I holds for it
    (run/tune/compile_stages.py compiles all of a worker's stages)

Imports `run.stage` and what is before it. Begin with `capture.py`.
"""
