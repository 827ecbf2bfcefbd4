import inspect
from pathlib import Path
from types import SimpleNamespace

from lightning.pytorch import loggers


def _only_arguments_of(kind):
    """Check the arguments: the clients of these services are not installed where tests run."""

    def made(**arguments):
        inspect.signature(kind).bind(**arguments)
        return SimpleNamespace(run_id="3f2c")

    return made


WandbLogger = _only_arguments_of(loggers.WandbLogger)
MLFlowLogger = _only_arguments_of(loggers.MLFlowLogger)
