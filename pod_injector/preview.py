"""Applies the webhook's decision to the pod templates of manifests, before a rollout. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pod_injector.manifests import PodTemplate, pod_templates
from pod_injector.not_injected import Reason
from pod_injector.parts import PatchParts
from pod_injector.pod_patch import INJECT_LABEL
from pod_injector.review import PREFIX, Verdict, review

_INJECTED = {"injected": "would be injected", "present": "is injected already"}
OTHER_NAMESPACE = "other-namespace"
"""Outcome of a pod outside the release's namespace: the API server does not ask the webhook about it."""


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
        labelled = copy.deepcopy(template.pod)
        metadata = labelled["metadata"] = dict(labelled.get("metadata") or {})
        metadata["labels"] = {**(metadata.get("labels") or {}), INJECT_LABEL: "true"}
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
