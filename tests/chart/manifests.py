"""Questions to rendered documents: pods, containers, labels, names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.chart.rendering import Document

COMPONENT = "app.kubernetes.io/component"
INSTANCE = "app.kubernetes.io/instance"
NAME = "app.kubernetes.io/name"
ENGINES = "context-cache.io/engines"
SELECTORS = (NAME, INSTANCE, COMPONENT)


@dataclass(frozen=True)
class Pod:
    """What one workload, or a pod of a test, makes run."""

    owner: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]
    """PodSpec."""

    @property
    def component(self) -> str:
        """Which part of ours it is."""
        return self.labels.get(COMPONENT, "")

    @property
    def native_sidecars(self) -> list[Mapping[str, Any]]:
        """Init containers that stay."""
        return [one for one in self.spec.get("initContainers", []) if one.get("restartPolicy") == "Always"]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        """All of them, those that only prepare first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def running(self) -> list[Mapping[str, Any]]:
        """Those that stay."""
        return [*self.native_sidecars, *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """Names and numbers of the ports that stay open."""
        return {port["name"]: port["containerPort"] for one in self.running for port in one.get("ports", [])}


def of_kind(documents: Iterable[Document], *kinds: str) -> list[Document]:
    """Return the documents of these kinds."""
    return [document for document in documents if document["kind"] in kinds]


def one(documents: Iterable[Document], kind: str, ending: str = "") -> Document:
    """Return the only document of a kind whose name ends so."""
    found = [document for document in of_kind(documents, kind) if name_of(document).endswith(ending)]
    assert len(found) == 1, (kind, ending, [name_of(document) for document in found])
    return found[0]


def name_of(document: Document) -> str:
    """Return its metadata.name."""
    return document["metadata"]["name"]


def identity(document: Document) -> tuple[str, str]:
    """Return what one document is known by in a namespace."""
    return document["kind"], name_of(document)


def pods(documents: Iterable[Document]) -> Iterator[Pod]:
    """Return every pod that the documents would make run."""
    for document in documents:
        if document["kind"] == "Pod":
            yield _pod(document, document)
        elif document["kind"] in {"Deployment", "StatefulSet", "DaemonSet", "Job"}:
            yield _pod(document, document["spec"]["template"])


def pod_of(documents: Iterable[Document], component: str) -> Pod:
    """Return the pod of a component's workload; tests' own pods are none."""
    found = [pod for pod in pods(documents) if pod.component == component and not pod.owner.startswith("Job/")]
    assert len(found) == 1, (component, [pod.owner for pod in found])
    return found[0]


def components(documents: Iterable[Document]) -> set[str]:
    """Return the parts that are installed."""
    return {pod.component for pod in pods(documents) if not pod.owner.startswith("Job/")}


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether a plain selector takes these labels."""
    return selector.items() <= labels.items()


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a LabelSelector takes these labels, as the API's reference says; empty takes all."""
    if not selects(selector.get("matchLabels", {}), labels):
        return False
    return all(_holds(expression, labels) for expression in selector.get("matchExpressions", []))


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, operator, values = expression["key"], expression["operator"], expression.get("values", [])
    answers = {
        "In": labels.get(key) in values,
        "NotIn": key not in labels or labels[key] not in values,  # codespell:ignore notin
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }
    return answers[operator]


def env_of(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's variables; those from elsewhere as what they come from."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container.get("env", [])}


def _pod(owner: Document, template: Document) -> Pod:
    metadata = template.get("metadata", {})
    return Pod(
        owner=f"{owner['kind']}/{name_of(owner)}",
        labels=metadata.get("labels", {}),
        annotations=metadata.get("annotations", {}),
        spec=template["spec"],
    )
