"""Weights that stages of different delays share: one updates them, all read old ones.

A shared weight has the largest delay of its stages, in all of them. The first stage
updates it: backwards come to it last, so that the others' gradients are there by then.

    stage 3, delay 0    F4 B4 ─ gradient ─┐ F5 B5             F6       step 6 reads the
                                          ▼                   ▲        values after 5
    stage 0, delay 1    F5             B4 + U4 ──── values ───┘        updates

Neither side waits for the other, but for what the order has it wait for anyway: a
gradient leaves with the last backward of its step and has until the first stage's, and
values have most of a step.

Stages on one device have the parameter itself: they read the old values that the first
of them keeps, and their gradients add up by themselves.
"""
