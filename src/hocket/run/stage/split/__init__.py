"""The backward in two halves: I, for which the stage before waits, and W.

A layer's backward makes two gradients out of one, and only the first is in a hurry:

    dy ──▶ layer ──▶ dx      I: on to the layer before, and so to the stage before
             │
             ▼
             dw              W: whenever there is time, before the weights are updated

Some layers' weights take long: linear, convolution, embedding, bilinear. Their calls
are replaced by the same operator with the weights cut off from the graph, and a hook
that keeps `dy`; W computes `dw` from it and the layer's input, with the operator's own
formula. All other parameters get their gradients in I, from autograd.

    forward      x ──▶ y = operator(x, w.detach())          no node for w in the graph
    I                  hook: keeps (x, dy)                  autograd goes on with dx
    W            w.grad += formula(x, dy)                   and x, dy are given back

    layers/          such layers: calls, formulas, what waits for W
    routes.py        which operators they stand for
    watch.py         the same for modules that are run as they are
    splitter.py      what a stage needs of a splitter:
    by_layers.py     all of the above
    by_graph.py      or, for anything and slowly, autograd's own graph taken apart
    make.py          the one or the other
"""
