"""Names of tags."""

MLFLOW_RUN_NAME = "mlflow.runName"
