"""What sharing a device costs, and how well it is predicted."""
