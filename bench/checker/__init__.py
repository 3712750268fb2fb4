"""How long the checker takes for a million ops."""
