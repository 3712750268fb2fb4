"""How many candidates the planner predicts per second."""
