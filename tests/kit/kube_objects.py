"""EndpointSlices and Pods as tests need them, and the calls that make, change and remove them on any API server."""

from __future__ import annotations

from typing import Any

import aiohttp

from contextcache.kubernetes.client import KubernetesApi
from contextcache.kubernetes.objects import (
    ENDPOINT_SLICES,
    KubernetesForbidden,
    KubernetesObject,
    Resource,
    Selection,
)
from tests.kit.until import until

SELECTOR = "context-cache.io/engines=cc"
LABELS = {"context-cache.io/engines": "cc"}
DEADLINE_S = 30.0


def slice_object(
    name: str,
    *endpoints: dict[str, Any],
    labels: dict[str, str] | None = None,
    address_type: str = "IPv4",
    port: int = 8000,
    port_name: str = "http",
    sidecar_port: int | None = 50061,
    sidecar_port_name: str = "kv-grpc",
) -> dict[str, Any]:
    """Return an EndpointSlice; `sidecar_port` None: the Service has none."""
    ports = [{"name": port_name, "port": port, "protocol": "TCP"}]
    if sidecar_port is not None:
        ports.append({"name": sidecar_port_name, "port": sidecar_port, "protocol": "TCP"})
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": LABELS if labels is None else labels},
        "addressType": address_type,
        "endpoints": list(endpoints),
        "ports": ports,
    }


def slice_entry(pod: str, address: str, **conditions: bool | None) -> dict[str, Any]:
    """Return one endpoint of a slice; conditions that are not named are as of a pod that does well."""
    conditions = {"ready": True, "serving": True, "terminating": False} | conditions
    return {
        "addresses": [address],
        "conditions": {name: value for name, value in conditions.items() if value is not None},
        "targetRef": {"kind": "Pod", "name": pod},
    }


def pod_object(name: str, *, sidecar: bool = True, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a vLLM pod, with its native sidecar or without."""
    # No node has that: a pod that ran would end slowly, and its name be taken so long.
    nowhere = {"context-cache.io/node": "nowhere"}
    spec: dict[str, Any] = {"containers": [{"name": "vllm", "image": "vllm:1"}], "nodeSelector": nowhere}
    if sidecar:
        spec["initContainers"] = [{"name": "kv-sidecar", "image": "cc:1", "restartPolicy": "Always"}]
    metadata = {"name": name, "labels": LABELS, "annotations": annotations or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class KubeAdmin(KubernetesApi):
    """Everything tests do to a server: the product's own client, and the verbs it has no use for."""

    async def add(self, resource: Resource, body: KubernetesObject) -> KubernetesObject:
        return await self._send("POST", resource.path(self.namespace), body)

    async def change(self, resource: Resource, name: str, **fields: Any) -> KubernetesObject:
        """Set fields of an object to what they shall be."""
        path = f"{resource.path(self.namespace)}/{name}"
        return await self._send("PUT", path, await self._send("GET", path) | fields)

    async def annotate(self, resource: Resource, name: str, **metadata: Any) -> KubernetesObject:
        """Set fields of an object's metadata."""
        found = await self._send("GET", f"{resource.path(self.namespace)}/{name}")
        return await self.change(resource, name, metadata=found["metadata"] | metadata)

    async def remove(self, resource: Resource, name: str) -> None:
        await self._send("DELETE", f"{resource.path(self.namespace)}/{name}")

    async def remove_all(self, resource: Resource) -> None:
        for found in (await self.list(Selection(resource, self.namespace, ""))).objects:
            await self.remove(resource, found["metadata"]["name"])

    async def until_started(self) -> None:
        """Ask until a server that was away allows again what its Roles allow."""
        selection = Selection(ENDPOINT_SLICES, self.namespace, "")
        await until(lambda: self.list(selection), what="it is allowed", despite=(KubernetesForbidden,))

    async def _send(self, method: str, path: str, body: KubernetesObject | None = None) -> dict[str, Any]:
        client = await self._connected()
        request = await client.param_serialize(method, path, body=body, auth_settings=["BearerToken"])
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        raw = await client.call_api(*request, _request_timeout=timeout, _preload_content=False)
        async with raw.response as answer:
            answer.raise_for_status()
            return await answer.json()
