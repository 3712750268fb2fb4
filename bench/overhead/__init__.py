"""What the runtime itself costs per op."""
