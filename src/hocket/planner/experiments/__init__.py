"""Published experiments, as work for the planner: nothing here is measured."""
