"""Applies the webhook's decision to the pod templates of Kubernetes manifests, before a rollout. Pure.

A manifest is YAML of any kind of object, in one or several documents, and may be hostile. Bounds apply before any value
is built: `BYTES_MAX` for the file, `_VALUES_MAX` for its values with each alias written out. With aliases, a file of a
kilobyte may stand for gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from pod_injector.engine_container import Reason
from pod_injector.parts import PatchParts
from pod_injector.pod_patch import INJECT_LABEL
from pod_injector.review import PREFIX, Verdict, review

BYTES_MAX = 1 << 20
"""Maximum bytes of one file. The API server takes objects up to 1.5 MiB, and a Deployment has some kilobytes."""
_VALUES_MAX = 100_000
"""Maximum number of values of one file. Each alias counts as a copy."""
_INJECTED = {"injected": "would be injected", "present": "is injected already"}
OTHER_NAMESPACE = "other-namespace"
"""Outcome of a pod outside the release's namespace: the API server does not ask the webhook about it."""


class UnreadableManifest(ValueError):
    """The file is not YAML, has no object, or exceeds a bound."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The decision about one pod template."""

    owner: str
    outcome: str
    """`injected`, `present`, the value of a `Reason`, or `other-namespace`."""
    text: str
    patch: list[dict[str, Any]]
    """RFC 6902, as the webhook would answer; empty if the pod would be left alone."""
    warns: bool = False
    """Whether the webhook would warn about a pod that it injects."""
    with_label: str = ""
    """Text for the same pod with the label, if it lacks the label."""

    @property
    def is_injected(self) -> bool:
        """Whether the pod would have the sidecar and the plugin."""
        return self.outcome in _INJECTED


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """One pod as a controller would create it."""

    owner: str
    """Kind and name of the object that holds it, such as `Deployment/llama`."""
    namespace: str
    """Namespace in the manifest; empty if it names none."""
    pod: dict[str, Any]


def previews(manifest: bytes, parts: PatchParts, *, namespace: str = "") -> Iterator[Preview]:
    """Yield a preview for each pod template of a file. Raises UnreadableManifest.

    `namespace`: namespace of the release. Empty: every namespace counts as the release's.
    """
    for template in pod_templates(manifest):
        if namespace and template.namespace not in {"", namespace}:
            text = (
                f"not injected ({OTHER_NAMESPACE}): the webhook is asked about pods in {namespace}, "
                f"and this one is in {template.namespace} (value injector.namespaceSelector)"
            )
            yield Preview(template.owner, OTHER_NAMESPACE, text, [])
        else:
            yield _preview(template, parts)


def _preview(template: PodTemplate, parts: PatchParts) -> Preview:
    verdict = _verdict(template.pod, parts)
    if verdict.outcome == Reason.OPTED_OUT:
        metadata = dict(template.pod["metadata"] or {})
        metadata["labels"] = {**(metadata.get("labels") or {}), INJECT_LABEL: "true"}
        labelled = template.pod | {"metadata": metadata}
        text = f'not injected (opted-out): the pod template has no label {INJECT_LABEL}: "true"'
        return Preview(template.owner, verdict.outcome, text, [], with_label=_text(_verdict(labelled, parts)))
    patch = verdict.patch if verdict.outcome in _INJECTED else []
    return Preview(template.owner, verdict.outcome, _text(verdict), patch, warns=bool(patch and verdict.warning))


def _verdict(pod: dict[str, Any], parts: PatchParts) -> Verdict:
    request = {"uid": "preview", "kind": {"kind": "Pod"}, "operation": "CREATE", "object": pod}
    try:
        return review({"kind": "AdmissionReview", "request": request}, parts)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        # An API server would reject a pod of this shape before it asks the webhook.
        return Verdict("preview", Reason.FAULT.value, [])


def _text(verdict: Verdict) -> str:
    if verdict.outcome == Reason.FAULT:
        return f"not injected ({Reason.FAULT.value}): the injector cannot read this pod template"
    facts = [_INJECTED.get(verdict.outcome, ""), verdict.warning.removeprefix(PREFIX)]
    return "; ".join(filter(None, facts))


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
    metadata = document["metadata"] if isinstance(document.get("metadata"), dict) else {}
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
