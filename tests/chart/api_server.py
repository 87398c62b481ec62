"""As much of a Kubernetes API server as Helm needs to install, upgrade and uninstall a release: objects in memory.

Discovery, create, get, list by label, update, patch, delete; any kind of a table. Nothing acts on the objects, nothing
is validated (test_chart_documents.py does that). Helm 3 patches with what has changed, Helm 4 sends whole objects.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

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


class ApiServer:
    """The objects, and where the server is."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.lock = threading.Lock()
        self.url = ""

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
            self._object("GET", parts)

    def do_POST(self) -> None:
        self._object("POST", urlsplit(self.path).path.strip("/").split("/"))

    do_PUT = do_PATCH = do_DELETE = lambda self: self._object(  # noqa: N815
        self.command, urlsplit(self.path).path.strip("/").split("/")
    )

    def _object(self, verb: str, parts: list[str]) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = _body(self.rfile.read(length))
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if rest[0] == "namespaces" and len(rest) > 2:
            rest = rest[2:]
        plural, name = rest[0], rest[1] if len(rest) > 1 else ""
        with self.cluster.lock:
            self._answer(*self._changed(verb, (plural, name or body.get("metadata", {}).get("name", "")), name, body))

    def _changed(self, verb: str, key: Key, name: str, body: Object) -> tuple[Object, int]:
        objects = self.cluster.objects
        if verb == "GET" and not name:
            return self._list(key[0]), 200
        if verb == "POST":
            if key in objects:
                return _status(409, "AlreadyExists"), 409
            objects[key] = _created(body)
            return objects[key], 201
        whole = "apply" in self.headers.get("content-type", "") or verb == "PUT"
        if verb == "PATCH" and whole and key not in objects:
            objects[key] = _created(body)
            return objects[key], 201
        if key not in objects:
            return _status(404, "NotFound"), 404
        if verb == "DELETE":
            return objects.pop(key), 200
        if verb in {"PUT", "PATCH"}:
            objects[key] = _created(body) if whole else _patched(objects[key], body)
        return objects[key], 200

    def _list(self, plural: str) -> Object:
        query = parse_qs(urlsplit(self.path).query)
        wanted = dict(item.split("=") for item in query.get("labelSelector", [""])[0].split(",") if "=" in item)
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


def _body(content: bytes) -> Object:
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


def _created(body: Object) -> Object:
    metadata = body.setdefault("metadata", {})
    metadata.setdefault("uid", "00000000-0000-0000-0000-000000000000")
    metadata["resourceVersion"] = "1"
    return body


def _patched(old: Object, patch: Object) -> Object:
    """Return an object after a merge patch; lists are replaced whole."""
    result = dict(old)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _patched(result[key], value)
        elif not key.startswith("$"):
            result[key] = value
    return result


def _status(code: int, reason: str) -> Object:
    head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return head | {"reason": reason, "code": code, "message": reason}
