"""Loggers that keep their runs in a service or database: WandbLogger, MLFlowLogger, and unknown ones."""
