"""EndpointSlices and Pods as tests need them, and the calls that make, change and remove them on any API server."""

from __future__ import annotations

import json
from typing import Any

from contextcache.kubernetes_api import KubernetesApi
from contextcache.kubernetes_objects import KubernetesObject, Resource, Selection

SELECTOR = "context-cache.io/engines=cc"
LABELS = {"context-cache.io/engines": "cc"}
DEADLINE_S = 30.0


def slice_object(
    name: str,
    *endpoints: dict[str, Any],
    labels: dict[str, str] | None = None,
    address_type: str = "IPv4",
    port: int = 8000,
    sidecar_port: int | None = 50061,
) -> dict[str, Any]:
    """Return an EndpointSlice; `sidecar_port` None: the Service has none."""
    ports = [{"name": "http", "port": port, "protocol": "TCP"}]
    if sidecar_port is not None:
        ports.append({"name": "kv-grpc", "port": sidecar_port, "protocol": "TCP"})
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
    spec: dict[str, Any] = {"containers": [{"name": "vllm", "image": "vllm:1"}]}
    if sidecar:
        spec["initContainers"] = [{"name": "kv-sidecar", "image": "cc:1", "restartPolicy": "Always"}]
    metadata = {"name": name, "labels": LABELS, "annotations": annotations or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class KubeAdmin(KubernetesApi):
    """Everything tests do to a server, with the product's own client and the verbs it lacks."""

    async def add(self, resource: Resource, body: KubernetesObject) -> KubernetesObject:
        return await self.create(resource, body, namespace=self.namespace, timeout_s=DEADLINE_S)

    async def read(self, resource: Resource, name: str) -> KubernetesObject:
        return await self.get(resource, namespace=self.namespace, name=name, timeout_s=DEADLINE_S)

    async def change(self, resource: Resource, name: str, **fields: Any) -> KubernetesObject:
        """Set fields of an object to what they shall be."""
        body = json.loads(json.dumps(await self.read(resource, name))) | fields
        return await self.replace(resource, body, namespace=self.namespace, timeout_s=DEADLINE_S)

    async def annotate(self, resource: Resource, name: str, **metadata: Any) -> KubernetesObject:
        """Set fields of an object's metadata."""
        found = await self.read(resource, name)
        return await self.change(resource, name, metadata=found["metadata"] | metadata)

    async def remove(self, resource: Resource, name: str) -> None:
        await self._json("DELETE", resource.path(self.namespace, name), timeout_s=DEADLINE_S)

    async def remove_all(self, resource: Resource) -> None:
        for found in (await self.list(Selection(resource, self.namespace, ""))).objects:
            await self.remove(resource, found["metadata"]["name"])
