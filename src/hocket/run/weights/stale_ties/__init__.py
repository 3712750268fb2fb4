"""Weights that stages of different delays share: one stage owns and updates each.

A shared weight has the largest delay of its stages, in all of them. The first stage
updates it: its backward is the last, so that the others' gradients are there by then.

    stage 3, delay 0    F4 B4 ─ gradient ─┐ F5 B5             F6       step 6 reads the
                                          ▼                   ▲        values after 5
    stage 0, delay 1    F5             B4 + U4 ──── values ───┘        updates

Neither side waits for the other longer than the schedule does anyway: a gradient leaves
with the last backward of its step and is needed at the first stage's, and values have
most of a step.

Stages on one device share the parameter itself: they read the old values that the first
of them keeps, and their gradients add up by themselves.
Imports what `run.weights` may. Begin with `stale_tie.py`.
"""
