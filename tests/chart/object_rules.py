"""Rules of an API server about one object: defaults, the spelling of quantities, fields that cannot change.

Sources: the API reference (defaults; "updates to statefulset spec for fields other than …"), and for quantities
`quantities.py`. Only fields that the chart sets or that its upgrades depend on have a default here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.chart.quantities import canonical, value

Object = dict[str, Any]

_POD = {
    "restartPolicy": "Always",
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "terminationGracePeriodSeconds": 30,
    "securityContext": {},
}
_CONTAINER = {"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File", "resources": {}}
_SPEC: dict[str, Object] = {
    "Deployment": {
        "replicas": 1,
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}},
    },
    "StatefulSet": {
        "replicas": 1,
        "revisionHistoryLimit": 10,
        "podManagementPolicy": "OrderedReady",
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
    },
    "HorizontalPodAutoscaler": {"minReplicas": 1},
    "Service": {"type": "ClusterIP", "sessionAffinity": "None"},
    "PersistentVolumeClaim": {"volumeMode": "Filesystem"},
}
_TOP = {"Secret": {"type": "Opaque"}}
_MUTABLE_OF_A_STATEFUL_SET = (
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
)


class InvalidError(Exception):
    """The object is refused with 422."""


def stored(found: Object) -> Object:
    """Return the object as a server stores it: without nulls, with defaults, quantities in their canonical form."""
    result: Object = _without_nulls(found)
    _fill(result, _TOP.get(result["kind"], {}))
    if defaults := _SPEC.get(result["kind"]):
        _fill(result.setdefault("spec", {}), defaults)
    spec = result.get("spec", {})
    if result["kind"] in _SPEC:
        if isinstance(spec.get("template"), dict):
            _fill_pod(spec["template"].setdefault("spec", {}))
        for claim in spec.get("volumeClaimTemplates", []):
            claim.update({"apiVersion": "v1", "kind": "PersistentVolumeClaim"} | claim)
            _fill(claim["spec"], _SPEC["PersistentVolumeClaim"])
            claim.setdefault("status", {"phase": "Pending"})
    if result["kind"] == "Pod":
        _fill_pod(spec)
    if "." not in result["apiVersion"].partition("/")[0]:
        _change_quantities(result, canonical)
    return result


def check_change(live: Object, new: Object) -> None:
    """Raise InvalidError where a field changes that cannot; both objects are as stored."""
    kind, name = new["kind"], new["metadata"]["name"]
    old, spec = live.get("spec", {}), new.get("spec", {})
    if kind == "StatefulSet" and _but(old, _MUTABLE_OF_A_STATEFUL_SET) != _but(spec, _MUTABLE_OF_A_STATEFUL_SET):
        *some, last = [f"'{field}'" for field in _MUTABLE_OF_A_STATEFUL_SET]
        raise InvalidError(
            f'StatefulSet.apps "{name}" is invalid: spec: Forbidden: updates to statefulset spec for fields other than '
            f"{', '.join(some)} and {last} are forbidden"
        )
    if kind == "Deployment" and old.get("selector") != spec.get("selector"):
        raise InvalidError(f'Deployment.apps "{name}" is invalid: spec.selector: field is immutable')
    if kind == "PersistentVolumeClaim":
        if _but(old, ("resources",)) != _but(spec, ("resources",)):
            raise InvalidError(f'PersistentVolumeClaim "{name}" is invalid: spec: Forbidden: spec is immutable')
        if value(_asked(spec)) < value(_asked(old)):
            raise InvalidError(
                f'PersistentVolumeClaim "{name}" is invalid: spec.resources.requests.storage: Forbidden: '
                "field can not be less than status.capacity"
            )


def _asked(claim: Object) -> str:
    return str(claim.get("resources", {}).get("requests", {}).get("storage", "0"))


def _but(spec: Object, fields: tuple[str, ...]) -> Object:
    """Return the other fields for a comparison, with quantities as numbers: 2Gi and 2147483648 are equal."""
    kept = copy.deepcopy({key: inner for key, inner in spec.items() if key not in fields})
    _change_quantities(kept, value)
    return kept


def _fill_pod(spec: Object) -> None:
    _fill(spec, _POD)
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        _fill(container, _CONTAINER)
        _fill(container, {"imagePullPolicy": "IfNotPresent"})
        for port in container.get("ports", []):
            port.setdefault("protocol", "TCP")


def _fill(found: Object, defaults: Object) -> None:
    for key, default in defaults.items():
        if isinstance(default, dict):
            inner = found.setdefault(key, {})
            # A strategy of another type has no rollingUpdate.
            if isinstance(inner, dict) and (key != "rollingUpdate" or found.get("type") == "RollingUpdate"):
                _fill(inner, default)
        else:
            found.setdefault(key, default)


def _without_nulls(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _without_nulls(inner) for key, inner in found.items() if inner is not None}
    return [_without_nulls(inner) for inner in found] if isinstance(found, list) else found


def _change_quantities(found: Any, change: Callable[[Any], Any]) -> None:
    """Change each `sizeLimit` and each amount of `resources` in place."""
    if isinstance(found, dict):
        if "sizeLimit" in found:
            found["sizeLimit"] = change(found["sizeLimit"])
        amounts = found.get("resources")
        for part in ("requests", "limits"):
            if isinstance(amounts, dict) and isinstance(amounts.get(part), dict):
                amounts[part] = {name: change(amount) for name, amount in amounts[part].items()}
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        _change_quantities(inner, change)
