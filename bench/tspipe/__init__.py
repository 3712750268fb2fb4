"""TSPipe's published experiments, on the simulator."""
