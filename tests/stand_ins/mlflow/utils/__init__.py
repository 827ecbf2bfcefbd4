"""Names that mlflow uses."""
