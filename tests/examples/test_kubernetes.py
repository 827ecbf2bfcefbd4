"""The manifest for Kubernetes is valid, and treats each way in which a run ends as its guide says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.signals import DEADLINE_EXIT_CODE, UNSAVED_EXIT_CODE

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "job.yaml"
GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"
VERSIONS = ("1.31", "1.37")  # the oldest that the guide names, and the newest that the package knows


def resources() -> list[dict[str, Any]]:
    """Return the volume claim and the Job."""
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def job() -> dict[str, Any]:
    """Return the specification of the Job."""
    return resources()[1]["spec"]


def action(exit_code: int) -> str:
    """Return what the Job does with a pod that has ended with a code, by the first rule that matches."""
    for rule in job()["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and (exit_code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return "Count"


@pytest.mark.parametrize("version", VERSIONS)
def test_manifest_is_valid(version: str) -> None:
    """Each resource is one that the API accepts, without a field that it doesn't know."""
    assert [resource["kind"] for resource in resources()] == ["PersistentVolumeClaim", "Job"]
    for resource in resources():
        kubernetes_validate.validate(resource, version, strict=True)


def test_misspelled_field_is_refused() -> None:
    """The negative control: validation is strict, at any depth."""
    changed = copy.deepcopy(resources()[1])
    pod = changed["spec"]["template"]["spec"]
    pod["terminationGracePeriod"] = pod.pop("terminationGracePeriodSeconds")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(changed, VERSIONS[1], strict=True)


def test_stops_are_not_counted() -> None:
    """A saved stop is no failure; a state that could not be written, an error, and a kill are."""
    sigterm = 128 + 15
    assert [action(code) for code in (sigterm, DEADLINE_EXIT_CODE)] == ["Ignore", "Ignore"]
    assert [action(code) for code in (UNSAVED_EXIT_CODE, 1, 137)] == ["Count", "Count", "Count"]
    [disruption] = [rule for rule in job()["podFailurePolicy"]["rules"] if "onPodConditions" in rule]
    assert disruption["action"] == "Ignore"


def test_pod_grants_enough_time_and_keeps_the_run() -> None:
    """The pod outlives `grace_seconds`. The autosaves and the signal get to where they are needed."""
    pod = job()["template"]["spec"]
    [container] = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > FaultTolerance()._options.grace_seconds + 10
    assert pod["restartPolicy"] == "Never"  # the API refuses podFailurePolicy otherwise
    assert all(
        rule["onExitCodes"]["containerName"] == container["name"]
        for rule in job()["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    )
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] in claims]
    assert mount["mountPath"] == container["workingDir"]
    assert claims[mount["name"]] == resources()[0]["metadata"]["name"]
    assert container["command"][0] == "python"


def test_guide_shows_the_manifest() -> None:
    """The Job in the guide is that of the manifest, without what the guide leaves out."""
    [shown] = [
        yaml.safe_load(text) for text in GUIDE.read_text().split("```yaml\n")[1:] for text in [text.split("```")[0]]
    ]
    whole = resources()[1]
    rules = whole["spec"]["podFailurePolicy"]["rules"]
    whole["spec"]["podFailurePolicy"]["rules"] = [rule for rule in rules if rule["action"] == "Ignore"]
    pod = whole["spec"]["template"]["spec"]
    del pod["volumes"]
    for name in ("volumeMounts", "resources"):
        del pod["containers"][0][name]
    assert shown == whole
