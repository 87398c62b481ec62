"""AdmissionReview in, AdmissionReview out (admission.k8s.io/v1). Pure. The answer always allows the pod.

A pod that cannot be injected starts unchanged but for an annotation with the reason. The client that created it gets a
warning.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contextcache.errors import InvalidRequest
from pod_injector.engine_container import NotInjected, Reason, engine_index, warning_about
from pod_injector.parts import PatchParts
from pod_injector.pod_patch import injection_patch, skip_patch

log = logging.getLogger(__name__)

_MAX_WARNING_CHARS = 256
"""The API server may cut longer warnings."""
PREFIX = "context-cache: "
"""Beginning of every warning."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one review."""

    uid: str
    outcome: str
    """`injected`, `present`, or the value of a `Reason`."""
    patch: list[dict[str, Any]]
    warning: str = ""

    def response(self) -> dict[str, Any]:
        """Return the AdmissionReview to answer with."""
        response: dict[str, Any] = {"uid": self.uid, "allowed": True}
        if self.patch:
            encoded = base64.b64encode(json.dumps(self.patch).encode()).decode()
            response |= {"patchType": "JSONPatch", "patch": encoded}
        if self.warning:
            response["warnings"] = [self.warning[:_MAX_WARNING_CHARS]]
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def review(body: Mapping[str, Any], parts: PatchParts) -> Verdict:
    """Decide about the pod of a review. Raises InvalidRequest unless the body is a review of a new pod."""
    request = body.get("request")
    if body.get("kind") != "AdmissionReview" or not isinstance(request, dict):
        raise InvalidRequest("the body is not an AdmissionReview")
    uid, pod = request.get("uid"), request.get("object")
    if not isinstance(uid, str) or not uid:
        raise InvalidRequest("the review has no uid")
    if (request.get("kind") or {}).get("kind") != "Pod" or request.get("operation") != "CREATE":
        raise InvalidRequest("the review is not about the creation of a pod")
    if not isinstance(pod, dict) or not isinstance(pod.get("spec"), dict):
        raise InvalidRequest("the review has no pod")
    return _verdict(uid, {**pod, "metadata": pod.get("metadata") or {}}, parts)


def _verdict(uid: str, pod: dict[str, Any], parts: PatchParts) -> Verdict:
    try:
        patch = injection_patch(pod, parts)
        if patch is None:
            return Verdict(uid, "present", [])
        doubt = warning_about(pod["spec"]["containers"][engine_index(pod)])
        return Verdict(uid, "injected", patch, f"{PREFIX}{doubt}" if doubt else "")
    except NotInjected as exc:
        refused = exc
    except Exception:
        # The pod must start, whatever its shape.
        log.exception("review failed")
        refused = NotInjected(Reason.FAULT, "internal fault of the injector, see its log")
    if refused.reason is Reason.OPTED_OUT:
        # The pod's author asked for nothing, so a warning would only disturb.
        return Verdict(uid, refused.reason.value, [])
    warning = f"{PREFIX}not injected ({refused.reason.value}): {refused.message}"
    return Verdict(uid, refused.reason.value, skip_patch(pod, refused.reason), warning)
