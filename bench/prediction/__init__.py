"""How well the simulator predicts a step."""
