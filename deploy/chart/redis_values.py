"""Values of the store: a Redis or Valkey of yours, or one node of the chart's own to try things with."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

from deploy.chart.kubernetes_values import NetworkPolicyPeers, Quantity, Resources, SecretKey, SecretName
from deploy.chart.pod_values import ImageReference, Pod, Registry, Repository, Tag, resources
from deploy.chart.section import Section

_URL = r"^((redis|rediss|redis\+cluster|rediss\+cluster|redis\+sentinel|rediss\+sentinel)://[^@\s]+)?$"


class RedisEgress(Section):
    """Where the store is, for the NetworkPolicy."""

    port: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 65535})] = Field(
        0,
        description="its port, after address translation; 0: the one in redis.url, else 6379. Sentinels' ports in "
        "redis.url are open too; those in a Secret nobody sees: networkPolicy.extraEgress.contextManager",
    )
    to: NetworkPolicyPeers = Field(default_factory=list, description="NetworkPolicyPeers; []: any address on that port")


class RedisValues(Section):
    """Exactly one of redis.url, redis.existingSecret and valkey.enabled."""

    url: Annotated[str, WithJsonSchema({"type": "string", "pattern": _URL})] = Field(
        "", description="URL without user and password; with them it belongs into a Secret"
    )
    existing_secret: SecretName = Field("", description="Secret with the whole URL, user and password included")
    secret_key: SecretKey = Field("redis-url", description="its key")
    tls_secret: SecretName = Field(
        "", description="Secret with ca.crt, who may sign the store's certificate (rediss://); empty: the system's CAs"
    )
    client_certificate: bool = Field(
        False, description="that Secret also has tls.crt and tls.key: show them to the store"
    )
    egress: RedisEgress = Field(default_factory=RedisEgress, description="where the store is, for the NetworkPolicy")


class ValkeyImage(ImageReference):
    """Valkey's own image."""

    registry: Registry = Field("docker.io", description="host of the registry; empty: image.registry")
    repository: Repository = Field("valkey/valkey", description="path in the registry")
    tag: Tag = Field("8.1.4", description="tag; floating tags (latest) are refused")


class ValkeyStorage(Section):
    """Its append-only file."""

    enabled: bool = Field(True, description="keep it on a volume; false: a restart forgets every session")
    size: Quantity = Field("2Gi", description="size of the volume")
    storage_class_name: SecretName = Field("", description="its StorageClass; empty: the cluster's default")


class ValkeyValues(Pod):
    """One node for trying: no replica, so its restart is an outage. The volume goes with the release."""

    enabled: bool = Field(False, description="run it")
    image: ValkeyImage = Field(default_factory=ValkeyImage, description="its image")
    storage: ValkeyStorage = Field(default_factory=ValkeyStorage, description="its append-only file")
    max_memory: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"})] = Field(
        "512mb",
        description="bytes of data, from which writes are refused (503); well below the memory limit, as rewriting the "
        "file takes memory too",
    )
    resources: Resources = Field(
        default_factory=lambda: resources("100m", "256Mi", "1Gi"), description="requests and limits of the container"
    )
