"""Out-of-order backprop's published experiments on one GPU, estimated."""
