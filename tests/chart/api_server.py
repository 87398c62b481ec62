"""As much of a Kubernetes API server as Helm needs to install, upgrade, roll back and uninstall a release.

Objects are in memory, in one namespace. The server keeps field ownership (`field_ownership.py`), defaults, canonical
quantities and immutable fields (`object_rules.py`), and reads the patches of both Helms (`patches.py`): server-side
apply from Helm 4, strategic and JSON merge patches from Helm 3.

A real server does more:
- It validates every field (`test_chart_documents.py` does), runs admission plugins and webhooks, and checks RBAC.
- It merges some lists by item in server-side apply. Here a list belongs to one manager.
- It keeps resource versions to watch, and deletes with finalizers and owners. Here a delete removes one object.
- Its controllers act: ReplicaSets, pods, claims of a StatefulSet, an autoscaler's number. Tests write such numbers
  through `scale`, and `small_node.py` places pods.
- It answers OpenAPI documents. Helm runs with `--disable-openapi-validation` here.
"""

from __future__ import annotations

import copy
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.chart.field_ownership import ConflictError, Manager, Owners, applied, set_owners, updated
from tests.chart.object_rules import InvalidError, check_change, stored
from tests.chart.patches import merged, strategically_merged
from tests.chart.protobuf_secret import MAGIC, secret

KINDS = {
    "v1": ("Secret", "ConfigMap", "Service", "ServiceAccount", "Pod", "PersistentVolumeClaim", "Namespace"),
    "apps/v1": ("Deployment", "StatefulSet", "ReplicaSet"),
    "batch/v1": ("Job",),
    "policy/v1": ("PodDisruptionBudget",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "admissionregistration.k8s.io/v1": ("MutatingWebhookConfiguration",),
    "cert-manager.io/v1": ("Certificate", "Issuer"),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "gateway.networking.k8s.io/v1": ("HTTPRoute", "BackendTLSPolicy"),
    "gateway.envoyproxy.io/v1alpha1": ("EnvoyExtensionPolicy", "BackendTrafficPolicy", "ClientTrafficPolicy"),
    "inference.networking.k8s.io/v1": ("InferencePool",),
}
NOT_NAMESPACED = {"MutatingWebhookConfiguration", "Namespace"}

Object = dict[str, Any]
Key = tuple[str, str]
"""Plural and name; there is one namespace."""


def plural_of(kind: str) -> str:
    """Return the name of a kind in paths."""
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}s"


class _Refusal(Exception):
    def __init__(self, code: int, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.code = code
        head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self.status = head | {"reason": reason, "code": code, "message": message or reason}


class ApiServer:
    """The objects, and where the server is."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.lock = threading.Lock()
        self.url = ""
        self._version = 0

    def kubeconfig(self, path: Path, namespace: str) -> Path:
        """Write a file for KUBECONFIG; JSON is YAML."""
        context = {"cluster": "here", "user": "me", "namespace": namespace}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": "any"}}],
            "contexts": [{"name": "here", "context": context}],
        }
        path.write_text(json.dumps(content))
        return path

    def of_kind(self, kind: str) -> dict[str, Object]:
        """Return the objects of a kind by name; not the Secrets in which Helm keeps its own records."""
        return {
            name: made
            for (plural, name), made in self.objects.items()
            if plural == plural_of(kind) and not name.startswith("sh.helm.release.")
        }

    def left(self) -> set[Key]:
        """Return what there is beside Helm's records."""
        return {key for key in self.objects if not key[1].startswith("sh.helm.release.")}

    def write(self, key: Key, owned: tuple[Object, Owners], *, keep: bool = True) -> Object:
        """Store an object with its owners, unless nothing changed or it is a dry run. Raises InvalidError."""
        new, owners = copy.deepcopy(owned[0]), owned[1]
        live = self.objects.get(key)
        metadata = new.setdefault("metadata", {})
        if live is not None:
            check_change(live, new)
            metadata |= {name: live["metadata"][name] for name in ("uid", "resourceVersion", "generation")}
        else:
            metadata |= {"uid": str(uuid.uuid4()), "generation": 1}
        set_owners(new, owners)
        if new == live:
            return live
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        metadata["generation"] += live is not None and live.get("spec") != new.get("spec")
        if keep:
            self.objects[key] = new
        return new


@contextmanager
def running_api_server() -> Iterator[ApiServer]:
    """Serve an empty cluster on loopback until the block ends."""
    cluster = ApiServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Handler", (_Requests,), {"cluster": cluster}))
    server.daemon_threads = True
    cluster.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield cluster
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Requests(BaseHTTPRequestHandler):
    cluster: ApiServer
    protocol_version = "HTTP/1.1"
    timeout = 60
    # An answer in one piece: in two, each would wait 40 ms for the other side's word.
    wbufsize = 1 << 16

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts == ["version"]:
            self._answer({"major": "1", "minor": "32", "gitVersion": "v1.32.0"})
        elif len(parts) <= {"api": 2, "apis": 3}.get(parts[0], 0):
            self._answer(_discovery(parts))
        else:
            self._object()

    do_POST = do_PUT = do_PATCH = do_DELETE = lambda self: self._object()  # noqa: N815

    def _object(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        body = _body(self.rfile.read(int(self.headers.get("content-length") or 0)))
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if rest[0] == "namespaces" and len(rest) > 2:
            rest = rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        with self.cluster.lock:
            try:
                if self.command == "GET" and not name:
                    self._answer(self._list(plural))
                    return
                key = (plural, name or body["metadata"]["name"])
                if subresource:
                    self._answer(self._scaled(key, subresource, body))
                    return
                self._answer(self._one(key, body), 201 if self.command == "POST" else 200)
            except _Refusal as refusal:
                self._answer(refusal.status, refusal.code)
            except ConflictError as conflict:
                self._answer(_Refusal(409, "Conflict", str(conflict)).status, 409)
            except InvalidError as invalid:
                self._answer(_Refusal(422, "Invalid", str(invalid)).status, 422)

    def _one(self, key: Key, body: Any) -> Object:
        live = self.cluster.objects.get(key)
        applies = "apply" in self.headers.get("content-type", "")
        if self.command == "POST":
            if live is not None:
                raise _Refusal(409, "AlreadyExists", f'{key[0]} "{key[1]}" already exists')
            return self._write(key, {}, body)
        if live is None and not applies:
            raise _Refusal(404, "NotFound", f'{key[0]} "{key[1]}" not found')
        if self.command == "DELETE":
            return self.cluster.objects.pop(key)
        if applies:
            if not self._asked("fieldManager"):
                raise _Refusal(400, "BadRequest", "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
            new, owners = applied(live or {}, body, self._asked("fieldManager"), force=self._asked("force") == "true")
            return self.cluster.write(key, (stored(new), owners), keep=not self._asked("dryRun"))
        assert live is not None
        return self._write(key, live, body if self.command == "PUT" else self._patched(live, body)) if body else live

    def _patched(self, live: Object, patch: Any) -> Object:
        kind = self.headers.get("content-type", "")
        if "json-patch" in kind:
            result = copy.deepcopy(live)
            for step in patch:
                root, section, field = step["path"].split("/")
                if (root, section, step["op"]) != ("", "metadata", "replace"):
                    raise _Refusal(400, "BadRequest", f"this server knows no such JSON patch: {step['path']}")
                result[section][field] = step["value"]
            return result
        return strategically_merged(live, patch) if "strategic" in kind else merged(live, patch)

    def _write(self, key: Key, live: Object, body: Object) -> Object:
        version = body.get("metadata", {}).get("resourceVersion")
        if live and version not in {None, live["metadata"]["resourceVersion"]}:
            raise _Refusal(409, "Conflict", f'{key[0]} "{key[1]}": the object has been modified')
        new = stored(body)
        return self.cluster.write(key, (new, updated(live, new, self._manager())), keep=not self._asked("dryRun"))

    def _scaled(self, key: Key, subresource: str, body: Object) -> Object:
        live = self.cluster.objects.get(key)
        if live is None or subresource != "scale" or self.command not in {"GET", "PUT", "PATCH"}:
            raise _Refusal(404, "NotFound", f'{key[0]} "{key[1]}" has no {subresource} to {self.command}')
        if self.command != "GET":
            new = copy.deepcopy(live)
            new["spec"]["replicas"] = body["spec"]["replicas"]
            live = self.cluster.write(key, (new, updated(live, new, self._manager("scale"))))
        head = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": key[1]}}
        return head | {"spec": {"replicas": live["spec"]["replicas"]}}

    def _manager(self, subresource: str = "") -> Manager:
        """Return the manager of a write that is no apply; a client that names none goes by its user agent."""
        agent = self.headers.get("user-agent", "unknown").partition("/")[0]
        return Manager(self._asked("fieldManager") or agent, "Update", subresource)

    def _asked(self, name: str) -> str:
        return parse_qs(urlsplit(self.path).query).get(name, [""])[0]

    def _list(self, plural: str) -> Object:
        wanted = dict(item.split("=") for item in self._asked("labelSelector").split(",") if "=" in item)
        found = [
            made
            for (of, _), made in self.cluster.objects.items()
            if of == plural and wanted.items() <= made["metadata"].get("labels", {}).items()
        ]
        kind = f"{found[0]['kind']}List" if found else "SecretList"
        return {"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": found}

    def _answer(self, body: Object, code: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _body(content: bytes) -> Any:
    if content.startswith(MAGIC):
        return secret(content)
    return yaml.load(content, Loader=yaml.CSafeLoader) if content else {}


def _discovery(parts: list[str]) -> Object:
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        groups = []
        for version in KINDS:
            if "/" in version:
                preferred = {"groupVersion": version, "version": version.partition("/")[2]}
                groups.append(
                    {"name": version.partition("/")[0], "versions": [preferred], "preferredVersion": preferred}
                )
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = "/".join(parts[1:])
    resources = [
        {
            "name": plural_of(kind),
            "singularName": kind.lower(),
            "kind": kind,
            "namespaced": kind not in NOT_NAMESPACED,
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        }
        for kind in KINDS.get(version, ())
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
