"""I and W beside the whole backward."""
