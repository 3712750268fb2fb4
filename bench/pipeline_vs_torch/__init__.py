"""hocket beside torch.distributed.pipelining."""
