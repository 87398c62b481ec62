"""values-openshift.yaml: what the constraint restricted-v2 refuses is in no pod, and DNS is reached where it is there.

The rules are those of the SecurityContextConstraint restricted-v2 (OpenShift 4.11 and later): no user or group outside
the namespace's range. A pod that names none gets one of that range.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.chart.tools import HELMS
from tests.chart.manifests import of_kind, one, pods
from tests.chart.releases import ENGINE, INJECTOR, merged
from tests.chart.rendering import CHART, Release, render
from tests.chart.test_chart_security import VOLUMES

OPENSHIFT = yaml.safe_load((CHART / "values-openshift.yaml").read_text())
RELEASE = merged(ENGINE, INJECTOR, {"tests": {"enabled": True}})
BOTH = pytest.mark.parametrize("helm", HELMS, ids=lambda helm: helm.version)
NUMBERS = {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"}


def contexts(documents: list[dict]) -> Iterator[dict[str, Any]]:
    """Yield the securityContext of every pod and container, of those that the injector adds too."""
    for pod in pods(documents):
        yield pod.spec["securityContext"]
        yield from (container["securityContext"] for container in pod.containers)
    parts = json.loads(one(documents, "ConfigMap", "-injector")["data"]["parts.json"])
    yield from (parts[name]["securityContext"] for name in ("payload", "sidecar"))


@BOTH
def test_no_pod_names_a_user_or_group(helm):
    found = list(contexts(render(Release(merged(RELEASE, OPENSHIFT)), helm)))

    assert [context for context in found if NUMBERS & context.keys()] == []
    assert len(found) > 12
    assert any(NUMBERS & context.keys() for context in contexts(render(Release(RELEASE), helm)))


@BOTH
def test_what_the_constraint_wants_stays(helm):
    documents = render(Release(merged(RELEASE, OPENSHIFT)), helm)
    for pod in pods(documents):
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {kind for volume in pod.spec.get("volumes", []) for kind in volume if kind != "name"} <= VOLUMES
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        for container in pod.containers:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert all("hostPort" not in port for port in container.get("ports", []))


def test_every_pod_reaches_openshift_s_dns():
    documents = render(Release(merged(RELEASE, OPENSHIFT)))
    wanted = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}
    reach = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for policy in of_kind(documents, "NetworkPolicy")
        for rule in policy["spec"].get("egress", [])
        if wanted in rule.get("to", []) and {"port": 5353, "protocol": "UDP"} in rule["ports"]
    }

    assert {"gateway", "context-manager", "envoy", "engine", "test"} <= reach
