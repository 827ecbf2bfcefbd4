"""Whether this machine has GPUs, checked without a call into CUDA. After such a call a fork could not use CUDA."""

from __future__ import annotations

import pytest
import torch

NUM_GPUS = torch.cuda.device_count()

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU")]
