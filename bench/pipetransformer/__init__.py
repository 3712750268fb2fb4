"""PipeTransformer's published experiments, on the simulator."""
