"""A client with the release's API key, and what it asks."""

from __future__ import annotations

import json
import ssl
from typing import Any

import httpx

from tests.chart.manifests import name_of, of_kind
from tests.kit.rendered.cluster import Cluster
from tests.kit.rendered.pod import Pod
from tests.kit.rendered.scenario import FRONT_NAME, MODEL
from tests.kit.until import wait_until

_ANSWER_S = 300.0
READY_S = 120.0


class Front:
    """The Service that clients use: one of its pods."""

    def __init__(self, cluster: Cluster, front_ca: bytes) -> None:
        self._cluster = cluster
        (service,) = [
            found for found in of_kind(cluster.made.documents, "Service") if name_of(found).endswith("-envoy")
        ]
        (entry,) = service["spec"]["ports"]
        release = cluster.made.release
        host = f"{name_of(service)}.{release.namespace}.svc.cluster.local"
        self.address = cluster.service(host, entry["port"])
        self.key = cluster.made.secret("-api-key", "api-key")
        self.name = FRONT_NAME if front_ca else ""
        """In its certificate; empty: no TLS."""
        # One byte string and no file: the CA of this test.
        verify = ssl.create_default_context(cadata=front_ca.decode()) if front_ca else True
        self._extensions = {"sni_hostname": self.name} if self.name else {}
        self.http = httpx.Client(
            base_url=f"{'https' if front_ca else 'http'}://{self.address}",
            headers={"authorization": f"Bearer {self.key}"},
            verify=verify,
            timeout=_ANSWER_S,
        )

    def wait_served(self) -> None:
        """Wait until requests reach a pod: Envoy and each gateway look once a second, not at the same moment."""
        gateways = self._cluster.of("gateway")
        wait_until(
            lambda: all(map(_has_all_it_needs, gateways)), what="gateways have what they need", deadline_s=READY_S
        )
        wait_until(
            lambda: self.ask("GET", "/v1/models").status_code,
            is_so=lambda status: status == 200,
            what="a pod answers",
            deadline_s=READY_S,
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Send one request."""
        return self.http.request(method, path, json=body, extensions=self._extensions)

    def create(self, **body: Any) -> dict[str, Any]:
        return self._ok("POST", "/v1/context", self._body(body))

    def complete(self, **body: Any) -> dict[str, Any]:
        return self._ok("POST", "/v1/completions", self._body(body))

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._ok("POST", "/v1/chat/completions", self._body(body))

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a streamed completion; `[DONE]` must come once and last."""
        body = self._body(body) | {"stream": True}
        with self.http.stream("POST", "/v1/completions", json=body, extensions=self._extensions) as response:
            lines = [line for line in response.iter_lines() if line]
        assert response.status_code == 200, lines
        assert lines.index("data: [DONE]") == len(lines) - 1
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def read(self, session_id: str) -> dict[str, Any]:
        return self._ok("GET", f"/v1/context/{session_id}")

    def delete(self, session_id: str) -> dict[str, Any]:
        return self._ok("DELETE", f"/v1/context/{session_id}")

    def wait_sealed(self, session_id: str) -> None:
        wait_until(
            lambda: self.read(session_id)["holder"]["state"],
            is_so=lambda state: state == "sealed",
            what=f"the KV of {session_id} is sealed",
            deadline_s=READY_S,
        )

    def delete_all(self) -> None:
        while contexts := self._ok("GET", "/v1/context?limit=100")["data"]:
            for context in contexts:
                self.delete(context["session_id"])

    def _ok(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = self.ask(method, path, body)
        assert response.status_code == 200, response.text
        return response.json()

    @staticmethod
    def _body(body: dict[str, Any]) -> dict[str, Any]:
        return {"model": MODEL, "temperature": 0, "max_tokens": 8} | body


def _has_all_it_needs(gateway: Pod) -> bool:
    try:
        return httpx.get(f"http://{gateway.address}:9090/readyz", timeout=READY_S).status_code == 200
    except httpx.TransportError:
        return False
