"""Change an order: each file is one function from Schedule to Schedule."""
