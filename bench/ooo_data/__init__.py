"""Reverse first-k beside DistributedDataParallel, on two hosts with a limited link."""
