"""How long the simulator takes for a million ops."""
