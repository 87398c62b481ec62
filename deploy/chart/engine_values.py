"""Values of vLLM pods: the chart's own engine, and the kv-sidecar beside it and in injected pods."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from deploy.chart.chart_settings import settings_schema
from deploy.chart.connector_values import connector_schema
from deploy.chart.kubernetes_values import ExtraEnv, FreeObject, Port, Resources, SecretKey, SecretName, Tolerations
from deploy.chart.pod_values import ImageReference, Pod, PodDisruptionBudget, Repository, resources
from deploy.chart.section import Section
from kv_sidecar.settings import SidecarSettings
from vllm_plugin.turn.settings import TurnSettings

_BYTES = r"^[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
ByteQuantity = Annotated[
    str, WithJsonSchema({"type": ["string", "integer"], "pattern": _BYTES, "examples": ["4Gi", "500M"]})
]
"""A Kubernetes quantity of bytes."""
OptionalByteQuantity = Annotated[str, WithJsonSchema({"type": ["string", "integer"], "pattern": f"^$|{_BYTES}"})]
"""The same, or nothing."""
AbsolutePath = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^/[A-Za-z0-9._/-]+$"})]
"""A directory in a container."""

TurnMap = Annotated[dict[str, Any], WithJsonSchema(settings_schema(TurnSettings, "TURN_"))]
SidecarMap = Annotated[dict[str, Any], WithJsonSchema(settings_schema(SidecarSettings, "SIDECAR_"))]
ConnectorMap = Annotated[dict[str, Any], WithJsonSchema(connector_schema())]


class EngineImage(ImageReference):
    """vLLM with the plugin in it (deploy/docker/Dockerfile.vllm)."""

    repository: Repository = Field("context-cache-vllm", description="path in the registry")


class Gpu(Section):
    """Accelerators of one pod."""

    resource: str = Field("nvidia.com/gpu", min_length=1, description="name of the extended resource")
    count: int = Field(1, ge=0, le=64, description="how many one pod gets; 0: vLLM runs on the CPU")


class SharedMemory(Section):
    """/dev/shm of vLLM's container, for tensor parallelism and NCCL; no KV is there."""

    size_limit: ByteQuantity = Field(
        "2Gi", description="size of the tmpfs; its pages count towards engine.resources.limits.memory"
    )


class ModelCache(Section):
    """Where the model is kept: a claim you have, a volume of the pod's own (size), else an emptyDir."""

    existing_claim: SecretName = Field("", description="PersistentVolumeClaim with or for models, shared by all pods")
    size: OptionalByteQuantity = Field(
        "", description="size of a volume of each pod's own that goes with the pod; empty: an emptyDir"
    )
    storage_class_name: SecretName = Field("", description="its StorageClass; empty: the cluster's default")
    empty_dir_size: OptionalByteQuantity = Field(
        "",
        description="most an emptyDir may hold, asked for as ephemeral-storage too; empty: no bound, and a model that "
        "fills the node's disk evicts pods",
    )
    read_only: bool = Field(False, description="mount it read-only: a claim that others filled, or ReadOnlyMany")
    mount_path: AbsolutePath = Field("/models", description="where it is mounted; HF_HOME points there")


class HuggingFaceToken(Section):
    """Token for models that ask for one."""

    name: SecretName = Field("", description="Secret that holds it; empty: none")
    key: SecretKey = Field("token", description="its key")


class Rollout(Section):
    """How a new version replaces the old one."""

    max_surge: int = Field(
        1, ge=0, description="pods more than replicas while it does; without a spare GPU 0, and maxUnavailable 1"
    )
    max_unavailable: int = Field(0, ge=0, description="pods less than replicas while it does")


class Probes(Section):
    """How long vLLM may take."""

    startup_s: int = Field(
        1800, ge=60, description="seconds from start to serving: download, loading and compiling of the model"
    )
    timeout_s: int = Field(10, ge=1, description="seconds for one answer of /health")
    liveness_failures: int = Field(
        12, ge=1, description="checks, 10 s apart, that must fail in a row before the container is restarted"
    )


class Engine(Pod):
    """vLLM by the chart. Other vLLM pods join by the injector."""

    enabled: bool = Field(False, description="run vLLM; off when your own vLLM pods get the sidecar injected")
    image: EngineImage = Field(default_factory=EngineImage, description="vLLM with the plugin")
    replicas: int = Field(1, ge=0, description="pods; null: whoever else scales them has them")
    model: str = Field("", description="model: a name at the hub or a path under modelCache.mountPath; required")
    served_model_name: str = Field("", description="name that clients use; empty: the model's")
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="GPUs that one copy of the model is spread over; must divide into gpu.count"
    )
    dtype: str = Field("auto", min_length=1, description="vLLM's --dtype")
    block_size: int = Field(
        16,
        ge=1,
        description="tokens in one of vLLM's KV blocks; sidecar.settings.blockTokens (256) is a multiple; "
        "without GPUs 32 or a multiple of it",
    )
    max_model_len: int = Field(0, ge=0, description="longest context in tokens; 0: the model's own")
    cpu_kv_cache_gib: int = Field(
        4,
        ge=1,
        alias="cpuKvCacheGiB",
        description="GiB of KV cache of an engine without GPUs; part of its memory limit",
    )
    extra_args: list[str] = Field(
        default_factory=list, description="more arguments of vLLM, each one a list item (--flag=value)"
    )
    gpu: Gpu = Field(default_factory=Gpu, description="accelerators")
    runtime_class_name: SecretName = Field("", description="RuntimeClass, such as nvidia; empty: the cluster's default")
    resources: Resources = Field(
        default_factory=lambda: resources("4", "16Gi", "48Gi"),
        description="requests and limits beside the GPUs; the memory limit covers shm.sizeLimit too",
    )
    tolerations: Tolerations = Field(
        default_factory=lambda: [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        description="taints of nodes that pods may run on all the same",
    )
    shm: SharedMemory = Field(default_factory=SharedMemory, description="vLLM's own shared memory")
    model_cache: ModelCache = Field(default_factory=ModelCache, description="where the model is kept")
    hf_token_secret: HuggingFaceToken = Field(default_factory=HuggingFaceToken, description="token of the hub")
    extra_init_containers: list[FreeObject] = Field(
        default_factory=list, description="more init containers, after the kv-sidecar: one that fetches a model, say"
    )
    extra_volumes: list[FreeObject] = Field(default_factory=list, description="more volumes of the pod")
    extra_volume_mounts: list[FreeObject] = Field(default_factory=list, description="more mounts of vLLM's container")
    shutdown_timeout_s: int = Field(60, ge=0, description="seconds that running answers get after SIGTERM")
    pre_stop_sleep_s: int = Field(
        10, ge=1, description="seconds between a pod's removal from discovery and SIGTERM: gateways have seen it go"
    )
    termination_grace_period_seconds: int = Field(
        120,
        ge=1,
        description="must exceed preStopSleepS and shutdownTimeoutS and leave the sidecar its handoverS and drainS",
    )
    rollout: Rollout = Field(default_factory=Rollout, description="rolling upgrade")
    probes: Probes = Field(default_factory=Probes, description="probes of vLLM")
    pod_security_context: FreeObject = Field(
        default_factory=lambda: {"fsGroupChangePolicy": "OnRootMismatch"},
        description="laid over podSecurityContext for engine pods. The default satisfies Pod Security restricted: our "
        "image of vLLM runs as 65532 too. An image that must be root needs runAsUser 0 and runAsNonRoot false, and a "
        "namespace that allows baseline; the sidecar then runs as that user as well, since vLLM opens its sockets",
    )
    container_security_context: FreeObject = Field(
        default_factory=lambda: {"readOnlyRootFilesystem": False},
        description="laid over containerSecurityContext for vLLM. Its root file system is writable by default, the one "
        "thing that differs from other parts (restricted does not ask for it): kernels are compiled at start, and not "
        "every compiler in the image keeps to the directories it is given. Try true with your model",
    )
    turn: TurnMap = Field(
        default_factory=dict, description="settings of the turn middleware (TURN_…), also in injected pods"
    )
    connector: ConnectorMap = Field(
        default_factory=dict,
        description="keys of the connector's kv_connector_extra_config, in its own spelling; also in injected pods",
    )
    pdb: PodDisruptionBudget = Field(default_factory=PodDisruptionBudget, description="disruption budget")


class SidecarStorage(Section):
    """The disk tier."""

    type: Literal["emptyDir", "ephemeral", "existingClaim"] = Field(
        "emptyDir",
        description="emptyDir: the node's disk; ephemeral: a volume of a StorageClass for each pod; both go with the "
        "pod, whose contexts other pods then compute anew. existingClaim: outlives the pod, for one replica",
    )
    size: ByteQuantity = Field("100Gi", description="size of the volume; must exceed diskLimit")
    storage_class_name: SecretName = Field("", description="StorageClass of ephemeral volumes; empty: the default")
    existing_claim: SecretName = Field("", description="PersistentVolumeClaim for type existingClaim")


class Sidecar(Section):
    """The kv-sidecar beside every vLLM pod, the chart's own and injected ones."""

    settings: SidecarMap = Field(default_factory=dict, description="settings of the kv-sidecar (SIDECAR_…)")
    memory_limit: ByteQuantity = Field(
        "4Gi",
        description="bytes of the memory that blocks are kept in and vLLM copies KV to and from, taken in full at the "
        "start; 0: none, KV then travels through the socket, which is slower",
    )
    disk_limit: ByteQuantity = Field("90Gi", description="bytes of blocks kept on disk; below storage.size")
    storage: SidecarStorage = Field(default_factory=SidecarStorage, description="disk for blocks")
    peers: bool = Field(True, description="sidecars of this release fetch KV from each other")
    peer_networks: list[str] = Field(
        default_factory=list,
        description='networks that pods live in ("10.0.0.0/8"), the only places KV is fetched from; []: any address, '
        "with the NetworkPolicy (and mutual TLS) as the guard",
    )
    resources: Resources = Field(
        default_factory=lambda: resources("500m", "5Gi", "6Gi"),
        description="requests and limits; of memory both must hold memoryLimit, which is taken at the start, and the "
        "limit 512Mi more: the process, and a block for each thread and frame stream",
    )
    extra_env: ExtraEnv = Field(
        default_factory=list,
        description="more environment variables: credentials of settings.storeUrl where pods have none of their own",
    )
    extra_volumes: list[FreeObject] = Field(
        default_factory=list,
        description="more volumes, also of injected pods: a mounted directory for settings.storeUrl",
    )
    extra_volume_mounts: list[FreeObject] = Field(default_factory=list, description="more mounts of the kv-sidecar")


class Discovery(Section):
    """What every vLLM pod of the release has in common."""

    port: Port = Field(8000, description="port of vLLM's HTTP API in every pod")
    sidecar_port: Port = Field(50061, description="port of the kv-sidecar's gRPC in every pod")
