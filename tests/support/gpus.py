"""How many ranks on GPUs a test may start: one for each GPU, or MOST on any number of GPUs if ranks may share them."""

import torch

import shared_gpus

MOST = 4


def most_ranks() -> int:
    gpus = torch.cuda.device_count()
    return max(gpus, MOST) if gpus and shared_gpus.allowed() else gpus
