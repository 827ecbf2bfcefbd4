"""Whether this machine has GPUs, found out without a call into CUDA, after which a fork could not use it."""

from __future__ import annotations

import pytest
import torch

NUM_GPUS = torch.cuda.device_count()

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU")]
