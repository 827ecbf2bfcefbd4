"""The manifest for Kubernetes is valid, and treats each way in which a run ends as its guide says."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.signals import DEADLINE_EXIT_CODE, UNSAVED_EXIT_CODE

ROOT = Path(__file__).parents[2]
CLAIM, JOB = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "job.yaml").read_text())
RULES: list[dict[str, Any]] = JOB["spec"]["podFailurePolicy"]["rules"]
VERSIONS = ("1.31", "1.37")  # the oldest that the guide names, and the newest that the package knows


def test_the_manifest_is_valid() -> None:
    """Each resource is one that the API accepts; a field with a wrong name, at any depth, would be refused."""
    assert [resource["kind"] for resource in (CLAIM, JOB)] == ["PersistentVolumeClaim", "Job"]
    for resource in (CLAIM, JOB):
        for version in VERSIONS:
            kubernetes_validate.validate(resource, version, strict=True)
    changed = copy.deepcopy(JOB)
    pod = changed["spec"]["template"]["spec"]
    pod["terminationGracePeriod"] = pod.pop("terminationGracePeriodSeconds")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(changed, VERSIONS[1], strict=True)


def test_stops_are_not_counted() -> None:
    """A saved stop is no failure; a state that could not be written, an error, and a kill are. The pod has time."""

    def action(exit_code: int) -> str:
        """Return what the Job does with a pod that has ended with a code, by the first rule that matches."""
        for rule in RULES:
            codes = rule.get("onExitCodes")
            if codes is not None and (exit_code in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
        return "Count"

    pod = JOB["spec"]["template"]["spec"]
    grace_seconds = inspect.signature(FaultTolerance).parameters["grace_seconds"].default
    assert pod["terminationGracePeriodSeconds"] > grace_seconds + 10
    found = {code: action(code) for code in (128 + 15, DEADLINE_EXIT_CODE, UNSAVED_EXIT_CODE, 1, 137)}
    assert list(found.values()) == ["Ignore", "Ignore", "Count", "Count", "Count"]
    assert [rule["action"] for rule in RULES if "onPodConditions" in rule] == ["Ignore"]  # a disruption


def test_the_guide_shows_the_manifest() -> None:
    """The Job in the guide is that of the manifest, without what the guide leaves out."""
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    [shown] = [yaml.safe_load(text.split("```")[0]) for text in guide.split("```yaml\n")[1:]]
    whole = copy.deepcopy(JOB)
    whole["spec"]["podFailurePolicy"]["rules"] = [rule for rule in RULES if rule["action"] == "Ignore"]
    pod = whole["spec"]["template"]["spec"]
    del pod["volumes"]
    for name in ("volumeMounts", "resources"):
        del pod["containers"][0][name]
    assert shown == whole
