"""Finds pod templates in Kubernetes manifests: YAML of any kind of object, several documents, hostile ones too. Pure.

Bounds apply before any value is built: `BYTES_MAX` for the file, `_VALUES_MAX` for its values with each alias written
out. With aliases, a file of a kilobyte may stand for gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

BYTES_MAX = 1 << 20
"""Maximum bytes of one file. The API server takes objects up to 1.5 MiB, and a Deployment has some kilobytes."""
_VALUES_MAX = 100_000
"""Maximum number of values of one file. Each alias counts as a copy."""


class UnreadableManifest(ValueError):
    """The file is not YAML, has no object, or exceeds a bound."""


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """One pod as a controller would create it."""

    owner: str
    """Kind and name of the object that holds it, such as `Deployment/llama`."""
    namespace: str
    """Namespace in the manifest; empty if it names none."""
    pod: dict[str, Any]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML as kubectl reads it: a date is a text, because JSON has no dates."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def pod_templates(manifest: bytes) -> list[PodTemplate]:
    """Return all pod templates of a file in their order. Raises UnreadableManifest."""
    if len(manifest) > BYTES_MAX:
        raise UnreadableManifest(f"larger than {BYTES_MAX >> 20} MiB")
    try:
        documents = [*_documents(manifest.decode("utf-8-sig"))]
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise UnreadableManifest(f"not YAML: {where}{exc.problem}") from exc
    except RecursionError as exc:
        raise UnreadableManifest("nested too deeply") from exc
    except UnreadableManifest:
        raise
    except (yaml.YAMLError, ValueError, TypeError) as exc:
        raise UnreadableManifest(f"not YAML that JSON can hold: {exc}") from exc
    return [template for document in documents for template in _of_object(document)]


def _documents(text: str) -> Iterator[dict[str, Any]]:
    loader = _Loader(text)
    left, number = _VALUES_MAX, 0
    try:
        while loader.check_node():
            node = loader.get_node()
            number += 1
            left = _without(left, node)
            # JSON makes aliases copies, and keys texts.
            document = json.loads(json.dumps(loader.construct_document(node)))
            if isinstance(document, dict):
                yield document
            elif document is not None:
                raise UnreadableManifest(f"document {number} is a {type(document).__name__}, not an object")
    finally:
        loader.dispose()


def _without(left: int, node: yaml.Node) -> int:
    """Return `left` less the values of a document. Raises UnreadableManifest for too many or endless values."""
    found = [node]
    while found:
        left -= 1
        if left < 0:
            raise UnreadableManifest(f"more than {_VALUES_MAX} values, with its aliases written out")
        value = found.pop()
        if isinstance(value, yaml.SequenceNode):
            found += value.value
        elif isinstance(value, yaml.MappingNode):
            found += [part for pair in value.value for part in pair]
    return left


def _of_object(document: dict[str, Any]) -> Iterator[PodTemplate]:
    if isinstance(document.get("items"), list):  # as `kubectl get -o yaml` prints
        for item in document["items"]:
            if isinstance(item, dict):
                yield from _of_object(item)
        return
    metadata = _mapping(document.get("metadata"))
    owner = f"{document.get('kind', 'object')}/{metadata.get('name') or metadata.get('generateName') or 'unnamed'}"
    for parent, spec in _pod_specs(document, document):
        # A custom resource with a bare pod spec passes its own labels on to the pod.
        of_pod = parent.get("metadata", {}) if parent.get("spec") is spec else metadata
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": of_pod, "spec": spec}
        yield PodTemplate(owner, str(metadata.get("namespace") or ""), pod)


def _pod_specs(value: Any, parent: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each pod spec below a value, with its parent. Every mapping with a list of containers is a pod spec."""
    if isinstance(value, list):
        for part in value:
            yield from _pod_specs(part, parent)
    elif isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield parent, value
            return
        for part in value.values():
            yield from _pod_specs(part, value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
