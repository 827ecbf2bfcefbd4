import os
import signal

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_faulttolerant import FaultTolerance

# The environment that srun sets for the first of eight tasks.
os.environ.update(
    RUN_DIRECTORY="run",
    SLURM_JOB_ID="1",
    SLURM_NODELIST="node[1-2]",
    SLURM_NODEID="0",
    SLURM_NTASKS="8",
    SLURM_NTASKS_PER_NODE="4",
    SLURM_PROCID="0",
    SLURM_LOCALID="0",
)
