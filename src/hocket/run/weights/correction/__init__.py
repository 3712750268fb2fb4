"""What may be done about the age of gradients, on the updates of delayed stages."""
