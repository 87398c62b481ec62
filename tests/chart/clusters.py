"""A cluster for tests that Helm changes: the API server in memory, or a real one that `TEST_KUBECONFIG` names.

A test gets a namespace of its own. On a real server the current context's user must be allowed to create namespaces,
and all in them; nothing need run there but the API server. Objects are read and written over HTTP on both.
"""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deploy.chart.tools import Helm
from tests.chart.api_server import plural_of, running_api_server
from tests.chart.rendering import CHART, run_helm
from tests.kit.kube_servers import REAL

Object = dict[str, Any]

_PREFIXES = {
    "Deployment": "apis/apps/v1",
    "StatefulSet": "apis/apps/v1",
    "HorizontalPodAutoscaler": "apis/autoscaling/v2",
    "PersistentVolumeClaim": "api/v1",
    "Secret": "api/v1",
}
_CALL_S = 30
RELEASE = "cc"


class Refused(Exception):
    """The server's answer is an error: its code, and its message as the text."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class HelmFailed(AssertionError):
    """Helm's complaint."""


class Cluster:
    """One namespace of a server, and Helm for it."""

    def __init__(self, kubeconfig: Path, namespace: str, directory: Path) -> None:
        self.kubeconfig, self.namespace = kubeconfig, namespace
        self._server, self._tls, self._headers = _access(kubeconfig, directory)

    def helm(self, helm: Helm, command: str, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Run a command of Helm on the release and return its output. Raises HelmFailed."""
        chart = [str(CHART), "--disable-openapi-validation"] if command in {"install", "upgrade"} else []
        given = [] if values is None else ["--values", "-"]
        done = run_helm(
            helm,
            *(command, RELEASE, *arguments[: command == "rollback"], *chart, *arguments[command == "rollback" :]),
            *("--namespace", self.namespace, *given),
            stdin=json.dumps(values or {}),
            env={"KUBECONFIG": str(self.kubeconfig)},
        )
        if done.returncode:
            raise HelmFailed(done.stderr)
        return done.stdout

    def get(self, kind: str, name: str) -> Object | None:
        """Return one object of the namespace, or None."""
        try:
            return self.call("GET", self.path(kind, name))
        except Refused as refused:
            if refused.code != 404:
                raise
            return None

    def replicas(self, name: str, kind: str = "Deployment") -> int | None:
        """Return the number of replicas that a workload of the release has; None: there is no such workload."""
        found = self.get(kind, f"{RELEASE}-context-cache-{name}")
        return None if found is None else found["spec"]["replicas"]

    def scale(self, name: str, replicas: int, *, manager: str, kind: str = "Deployment") -> None:
        """Set the number of replicas as `manager` does: by the subresource."""
        full = f"{RELEASE}-context-cache-{name}"
        scale = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": full, "namespace": self.namespace},
            "spec": {"replicas": replicas},
        }
        self.call("PUT", f"{self.path(kind, full)}/scale?fieldManager={manager}", scale)

    def state(self) -> str:
        """Return the workloads as text, to see whether any was changed."""
        listed = [self.call("GET", self.path(kind)) for kind in ("Deployment", "StatefulSet")]
        made = [found for each in listed for found in each["items"]]
        return json.dumps([(found["metadata"]["name"], found["spec"]) for found in made], sort_keys=True)

    def path(self, kind: str, name: str = "") -> str:
        """Return where a kind, or one object of it, is."""
        return f"{_PREFIXES[kind]}/namespaces/{self.namespace}/{plural_of(kind)}{'/' if name else ''}{name}"

    def call(self, verb: str, path: str, body: Any = None, content_type: str = "application/json") -> Object:
        """Make one call. Raises Refused."""
        request = urllib.request.Request(
            f"{self._server}/{path}",
            method=verb,
            data=None if body is None else json.dumps(body).encode(),
            headers=self._headers | {"content-type": content_type},
        )
        handlers = [urllib.request.ProxyHandler({})]
        if self._tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=self._tls))
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=_CALL_S) as answer:
                found: Object = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, json.load(error)["message"]) from error


@contextmanager
def running_cluster(kind: str) -> Iterator[Cluster]:
    """Give a namespace of a `fake` or a `real` server, until the block ends."""
    with tempfile.TemporaryDirectory() as home:
        if kind == "fake":
            with running_api_server() as server:
                yield Cluster(server.kubeconfig(Path(home) / "kubeconfig", "llm"), "llm", Path(home))
            return
        cluster = Cluster(Path(REAL), f"chart-{uuid.uuid4().hex[:8]}", Path(home))
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}}
        cluster.call("POST", "api/v1/namespaces", made)
        try:
            yield cluster
        finally:
            cluster.call("DELETE", f"api/v1/namespaces/{cluster.namespace}")


def _access(kubeconfig: Path, directory: Path) -> tuple[str, ssl.SSLContext | None, dict[str, str]]:
    """Return the current context's address, its TLS and its headers."""
    config = yaml.safe_load(kubeconfig.read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    headers = {"authorization": f"Bearer {user['token']}"} if "token" in user else {}
    if not cluster["server"].startswith("https:"):
        return cluster["server"], None, headers
    tls = ssl.create_default_context(cafile=_file(cluster, "certificate-authority", kubeconfig, directory))
    if certificate := _file(user, "client-certificate", kubeconfig, directory):
        tls.load_cert_chain(certificate, _file(user, "client-key", kubeconfig, directory))
    return cluster["server"], tls, headers


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)


def _file(section: Object, key: str, kubeconfig: Path, directory: Path) -> str | None:
    """Return the file of a PEM text that a kubeconfig names or holds."""
    if f"{key}-data" in section:
        path = directory / f"{key}.pem"
        path.write_bytes(base64.b64decode(section[f"{key}-data"]))
        return str(path)
    return str(kubeconfig.parent / section[key]) if key in section else None
