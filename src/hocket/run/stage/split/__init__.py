"""Splits a backward into I, which the stage before waits for, and W.

A layer's backward makes two gradients, and only the first is waited for:

    dy ──▶ layer ──▶ dx      I: on to the layer before, and so to the stage before
             │
             ▼
             dw              W: whenever there is time, before the weights are updated

Some layers' weight gradients take long: linear, convolution, embedding, bilinear. Their
calls are replaced by the same operator with the weights detached from the graph, and a
hook that keeps `dy`; W computes `dw` from it and the layer's input, with the operator's
own formula. All other parameters get their gradients in I, from autograd.

    forward      x ──▶ y = operator(x, w.detach())          no node for w in the graph
    I                  hook: keeps (x, dy)                  autograd goes on with dx
    W            w.grad += formula(x, dy)                   and x, dy are released

    layers/          such layers: calls, formulas, what waits for W
    routes.py        which operators they replace
    by_layers.py     the same for modules that are run as they are; the splitter of a
                     stage, from all of this

Imports `run.data` and what is before it. Begin with `by_layers.py`.
"""
