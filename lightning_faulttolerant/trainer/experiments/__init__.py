"""Loggers that keep their runs in a service or database: WandbLogger and MLFlowLogger, and those we don't know."""
