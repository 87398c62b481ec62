"""Says of manifests what the webhook would say of their pods: the same decision, before anything is applied. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pod_injector.manifests import PodTemplate, pod_templates
from pod_injector.not_injected import Reason
from pod_injector.parts import PatchParts
from pod_injector.pod_patch import INJECT_LABEL
from pod_injector.review import Verdict, review

_PREFIX = "context-cache: "
_INJECTED = {"injected", "present"}
OTHER_NAMESPACE = "other-namespace"
"""Outcome of a pod that no webhook is asked about, as its namespace is not the release's."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What would become of one pod template."""

    owner: str
    outcome: str
    """`injected`, `present`, the value of a `Reason`, or `other-namespace`."""
    text: str
    patch: list[dict[str, Any]]
    """RFC 6902, as the webhook would answer; empty where the pod would be left alone."""
    warns: bool = False
    """Whether the webhook would warn of a pod that it injects."""
    with_label: str = ""
    """Of a pod without the label: what would become of it with the label."""

    @property
    def is_injected(self) -> bool:
        """Whether the pod would have the sidecar and the plugin."""
        return self.outcome in _INJECTED


def previews(manifest: bytes, parts: PatchParts, *, namespace: str = "") -> Iterator[Preview]:
    """Yield a preview for each pod template of a file. Raises UnreadableManifest.

    `namespace`: the release's; templates that name another are not asked about. Empty: any will do.
    """
    for template in pod_templates(manifest):
        if namespace and template.namespace not in {"", namespace}:
            text = (
                f"not injected ({OTHER_NAMESPACE}): the webhook is asked about pods in {namespace}, "
                f"and this one is in {template.namespace} (value injector.namespaceSelector)"
            )
            yield Preview(template.owner, OTHER_NAMESPACE, text, [])
            continue
        yield _preview(template, parts)


def _preview(template: PodTemplate, parts: PatchParts) -> Preview:
    verdict = _verdict(template, parts)
    if verdict.outcome == Reason.OPTED_OUT:
        labelled = _verdict(_with_label(template), parts)
        text = f'not injected (opted-out): the pod template has no label {INJECT_LABEL}: "true"'
        return Preview(template.owner, verdict.outcome, text, [], with_label=_text(labelled))
    patch = verdict.patch if verdict.outcome in _INJECTED else []
    return Preview(template.owner, verdict.outcome, _text(verdict), patch, warns=bool(patch and verdict.warning))


def _verdict(template: PodTemplate, parts: PatchParts) -> Verdict:
    request = {"uid": "preview", "kind": {"kind": "Pod"}, "operation": "CREATE", "namespace": template.namespace}
    try:
        return review({"kind": "AdmissionReview", "request": request | {"object": template.pod}}, parts)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        # No API server sends a pod of this shape, so the webhook need not judge it.
        return Verdict("preview", Reason.FAULT.value, [])


def _with_label(template: PodTemplate) -> PodTemplate:
    pod = copy.deepcopy(template.pod)
    metadata = pod["metadata"] = dict(pod.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), INJECT_LABEL: "true"}
    return PodTemplate(template.owner, template.namespace, pod)


def _text(verdict: Verdict) -> str:
    if verdict.outcome == Reason.FAULT:
        return f"not injected ({Reason.FAULT.value}): the injector cannot read this pod template"
    said = verdict.warning.removeprefix(_PREFIX)
    if verdict.outcome not in _INJECTED:
        return said
    text = "would be injected" if verdict.outcome == "injected" else "is injected already"
    return f"{text}; {said}" if said else text
