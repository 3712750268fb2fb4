"""What can only be seen on an accelerator."""
