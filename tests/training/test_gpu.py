"""Training on GPUs over NCCL: the weights are the same as on one GPU, replicas stay bitwise equal, and a trace shows that
all-gathers overlap computation."""

import pytest
import torch

from tests.support.gpus import torchrun

GPUS = torch.cuda.device_count()


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and here are {GPUS}")
def test_training_on_gpus(seed: int) -> None:
    torchrun(4 if GPUS >= 4 else 2, "-m", "tests.training.gpu_rank", str(seed), timeout=600)
