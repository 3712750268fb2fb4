"""Schedule in, schedule out: one file for each way to change an order."""
