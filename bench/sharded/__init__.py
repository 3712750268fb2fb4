"""Sharded stages beside torch's own FSDP2."""
