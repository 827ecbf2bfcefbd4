"""The client, which writes each change at once."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlflow.entities import Metric, Param


class MlflowClient:
    """What MLFlowLogger uses of a client.

    Args:
        tracking_uri: ``file:`` and the path of a file.
    """

    def __init__(self, tracking_uri: str) -> None:
        self._path = Path(tracking_uri.removeprefix("file:"))
        self._runs: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1", lifecycle_stage="active")

    def create_run(self, experiment_id: str, tags: dict[str, str]) -> Any:
        """Make a run, and draw its name, as mlflow does."""
        run_id = os.urandom(8).hex()
        name = random.choice(["calm", "bold", "shy", "wise"])
        self._runs[run_id] = {"status": "RUNNING", "name": name, "metrics": {}, "params": {}}
        self._write()
        return self.get_run(run_id)

    def get_run(self, run_id: str) -> Any:
        run = self._runs[run_id]
        metrics = {key: points[-1][1] for key, points in run["metrics"].items()}
        info = SimpleNamespace(run_id=run_id, experiment_id="1", status=run["status"])
        return SimpleNamespace(info=info, data=SimpleNamespace(metrics=metrics, params=run["params"]))

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [Metric(key, value, 0, step) for step, value in self._runs[run_id]["metrics"].get(key, [])]

    def update_run(self, run_id: str, status: str) -> None:
        self._runs[run_id]["status"] = status
        self._write()

    set_terminated = update_run

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = (), tags: Sequence[Any] = ()
    ) -> None:
        run = self._runs[run_id]
        for one in metrics:
            run["metrics"].setdefault(one.key, []).append([one.step, float(one.value)])
        for param in params:
            if run["params"].setdefault(param.key, param.value) != param.value:
                raise ValueError(f"Changing param values is not allowed: {param.key}")
        self._write()

    def log_metric(self, run_id: str, key: str, value: float, timestamp: Any = None, step: int | None = None) -> None:
        self.log_batch(run_id, [Metric(key, value, 0, step or 0)])

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.with_suffix(".new").write_text(json.dumps(self._runs))
        self._path.with_suffix(".new").replace(self._path)
