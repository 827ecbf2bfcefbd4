"""An mlflow whose store is a JSON file, named by the tracking URI."""


def set_tracking_uri(uri: str) -> None:
    """Take where runs are kept."""
