"""What clients get."""

from dataclasses import dataclass


@dataclass
class Metric:
    """A point."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass
class Param:
    """A parameter."""

    key: str
    value: str
