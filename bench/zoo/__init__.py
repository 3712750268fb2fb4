"""The zoo's architectures: a plain process, DDP and pipelines; and how well planned."""
