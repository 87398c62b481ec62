"""A rendered release that runs: its pods as processes on loopback, what a cluster makes of its Services, its API.

Every pod has an address of its own, so the ports are the rendered ones. EndpointSlices, pods and DNS follow from
selectors and from what readiness probes say; they change when the test looks (`observe`), never by themselves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from tests.chart.manifests import COMPONENT, name_of, of_kind, selects
from tests.chart.rendering import Document
from tests.kit.fake_kube import FakeKube
from tests.kit.kube_objects import slice_entry
from tests.kit.name_server import NameServer
from tests.kit.rendered.installation import Installation
from tests.kit.rendered.pod import Pod
from tests.kit.rendered.substitutions import Substitutions
from tests.kit.rendered.volumes import Objects, Volumes
from tests.kit.until import wait_until

READY_S = 300.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Given:
    """What somebody brings along who installs the chart."""

    secrets: tuple[Document, ...] = ()
    claims: Mapping[str, Path] | None = None
    """Folders of PersistentVolumeClaims by name."""


@dataclass(frozen=True)
class Seen:
    """A pod at one moment."""

    alive: bool
    started: bool
    passes: bool
    """Its readiness probes do, whatever the kubelet makes of them."""
    ready: bool

    @classmethod
    def of(cls, pod: Pod) -> Seen:
        """Look at it. What changes meanwhile: a pod that was ready had started, and had passed."""
        alive, ready = all(one.pids for one in pod.running), pod.ready
        passes = all(one.passes("readiness") for one in pod.running)
        return cls(alive, pod.started, passes, ready)


class Cluster:
    """The pods of one installation."""

    def __init__(
        self, made: Installation, given: Given, folder: Path, kube: FakeKube, names: NameServer, portal: BlockingPortal
    ) -> None:
        self.made, self.kube, self.names = made, kube, names
        self.pods: list[Pod] = []
        self.history: list[dict[str, Seen]] = []
        """What `start` saw of the first pod of each component."""
        self._given, self._folder, self._portal = given, folder, portal
        self._objects = Objects([*of_kind(made.documents, "Secret", "ConfigMap"), *given.secrets])
        self._kubeconfig = kube.write_kubeconfig(folder / "kubeconfig", namespace=made.release.namespace)
        self._network = f"127.{random.randint(1, 250)}.{random.randint(0, 255)}"
        self._num_pods = 0
        # Those first whose addresses stand in others' secrets.
        for workload in of_kind(made.documents, "StatefulSet") + of_kind(made.documents, "Deployment"):
            for number in range(workload["spec"]["replicas"]):
                self.pods.append(self._pod(workload, workload["spec"]["template"], ordinal=number))

    def of(self, component: str) -> list[Pod]:
        """Return the pods of a component."""
        return [pod for pod in self.pods if pod.labels.get(COMPONENT) == component]

    def start(self) -> None:
        """Start all pods at once, as a cluster does, and return when all are ready."""
        with ThreadPoolExecutor(len(self.pods)) as pool:
            starts = [pool.submit(pod.start) for pod in self.pods]
            try:
                while not self._all_done(starts):
                    self.observe()
                    self.history.append({pod.labels[COMPONENT]: Seen.of(pod) for pod in reversed(self.pods)})
                    time.sleep(_POLL_S)
            except BaseException:
                # So that the other starts end too.
                self.kill()
                raise
        self.wait_ready()

    def observe(self) -> None:
        """Probe every pod and let Services, DNS and the API know."""
        for pod in self.pods:
            pod.observe()
        self.publish()

    def wait_ready(self) -> None:
        """Wait until every pod is ready."""

        def last_words() -> list[str]:
            self.observe()
            return [one.last_words() for pod in self.pods if not pod.ready for one in pod.running]

        wait_until(
            last_words,
            is_so=lambda words: not words,
            what="every pod is ready",
            deadline_s=READY_S,
            interval_s=_POLL_S,
        )

    def restart_ended(self) -> None:
        """Start containers again that have ended."""
        for pod in self.pods:
            for one in pod.running:
                if one.exit_status() is not None:
                    pod.restart(one)

    def replace(self, old: Pod) -> list[str]:
        """Do a rollout's step with maxUnavailable 0: a new pod, and when it is ready the end of the old one.

        Return which containers of the old one had to be killed.
        """
        workload = self._workload("Deployment", old)
        new = self._pod(workload, workload["spec"]["template"])
        self.pods.append(new)
        new.start()
        self.wait_ready()
        return self._end(old)

    def recreate(self, old: Pod) -> Pod:
        """Do a StatefulSet's step: the end of a pod, and then one of the same name with the same claims."""
        workload = self._workload("StatefulSet", old)
        assert self._end(old) == []
        new = self._pod(workload, workload["spec"]["template"], ordinal=int(old.name.rpartition("-")[2]))
        self.pods.append(new)
        new.start()
        self.wait_ready()
        return new

    def _end(self, pod: Pod) -> list[str]:
        pod.terminating = True
        self.publish()
        killed = pod.end()
        self.pods.remove(pod)
        self.publish()
        return killed

    def _workload(self, kind: str, pod: Pod) -> Document:
        (workload,) = [
            found
            for found in of_kind(self.made.documents, kind)
            if found["spec"]["template"]["metadata"]["labels"] == pod.labels
        ]
        return workload

    def test_pod(self) -> Pod:
        """Return the pod of `helm test`, not started."""
        (hook,) = [hook for hook in self.made.hooks if "test" in hook["metadata"]["annotations"]["helm.sh/hook"]]
        return self._pod(hook, hook["spec"]["template"])

    def service(self, host: str, port: int) -> str:
        """Return address and port of a pod that a Service's name and port lead to, a ready one if there is one."""
        service = self._services()[host]
        (entry,) = [entry for entry in service["spec"]["ports"] if entry["port"] == port]
        pods = self._selected(service)
        if not pods:
            return f"{host}:{port}"  # a name that leads nowhere
        pod = next((pod for pod in pods if pod.ready), pods[0])
        return f"{pod.address}:{_target(entry, pod)}"

    def secret(self, name: str, key: str) -> str:
        """Return one value of a Secret, the chart's or one given to it."""
        return self._objects.value("Secret", name, key)

    def publish(self) -> None:
        """Bring DNS and the API up to date."""
        services = self._services()
        self.names.addresses = {
            host: [pod.address for pod in self._selected(service) if _is_listed(service, pod)]
            for host, service in services.items()
            if service["spec"].get("clusterIP") == "None"
        }
        wanted = {("pods", pod.name): _object_of(pod) for pod in self.pods}
        for service in services.values():
            if pods := self._selected(service):
                wanted["endpointslices", f"{name_of(service)}-1"] = _slice(service, pods)
        self._portal.call(self._store, wanted)

    def kill(self) -> None:
        """Leave no process behind."""
        for pod in self.pods:
            pod.kill()

    async def _store(self, wanted: dict[tuple[str, str], dict[str, Any]]) -> None:
        namespace = self.made.release.namespace
        for (plural, name), body in wanted.items():
            key = (plural, namespace, name)
            old = self.kube.objects.get(key, {})
            if any(old.get(field) != value for field, value in body.items() if field != "metadata") or not old:
                await self.kube._store(key, body)
        for key in [key for key in self.kube.objects if (key[0], key[2]) not in wanted]:
            await self.kube._remove(key, self.kube.objects[key])

    def _services(self) -> dict[str, Document]:
        release = self.made.release
        domain = f"{release.namespace}.svc.{release.values.get('clusterDomain', 'cluster.local')}"
        return {f"{name_of(found)}.{domain}": found for found in of_kind(self.made.documents, "Service")}

    def _selected(self, service: Document) -> list[Pod]:
        return [pod for pod in self.pods if selects(service["spec"]["selector"], pod.labels)]

    def _pod(self, owner: Document, template: Mapping[str, Any], *, ordinal: int = 0) -> Pod:
        self._num_pods += 1
        stays = owner["kind"] == "StatefulSet"
        name = f"{name_of(owner)}-{ordinal if stays else self._num_pods}"
        address = f"{self._network}.{self._num_pods}"
        folder = self._folder / str(self._num_pods)
        folder.mkdir()
        claimed = [template["metadata"]["name"] for template in owner["spec"].get("volumeClaimTemplates", [])]
        claims = {each: self._folder / "claims" / f"{each}-{name}" for each in claimed}
        volumes = Volumes(template["spec"], claims, self._objects, folder / "v", self._given.claims or {})
        return Pod(
            template,
            name=name,
            namespace=self.made.release.namespace,
            address=address,
            folder=folder,
            objects=self._objects,
            volumes=volumes,
            substitutions=lambda address, mounts: Substitutions(address, mounts, self.names, self.service),
            kubeconfig=self._kubeconfig,
        )

    @staticmethod
    def _all_done(starts: Iterable[Future[None]]) -> bool:
        done = [start for start in starts if start.done()]
        for start in done:
            start.result()
        return len(done) == len(list(starts))


def _is_listed(service: Document, pod: Pod) -> bool:
    return service["spec"].get("publishNotReadyAddresses", False) or (pod.ready and not pod.terminating)


def _target(entry: Mapping[str, Any], pod: Pod) -> int:
    target = entry.get("targetPort", entry["port"])
    return target if isinstance(target, int) else pod.ports[target]


def _slice(service: Document, pods: list[Pod]) -> dict[str, Any]:
    labels = service["metadata"]["labels"] | {"kubernetes.io/service-name": name_of(service)}
    conditions = {pod.name: {"ready": _is_listed(service, pod), "serving": pod.ready} for pod in pods}
    return {
        "metadata": {"name": f"{name_of(service)}-1", "labels": labels},
        "addressType": "IPv4",
        "endpoints": [
            slice_entry(pod.name, pod.address, **conditions[pod.name], terminating=pod.terminating) for pod in pods
        ],
        "ports": [
            {"name": entry["name"], "port": _target(entry, pods[0]), "protocol": "TCP"}
            for entry in service["spec"]["ports"]
        ],
    }


def _object_of(pod: Pod) -> dict[str, Any]:
    metadata = {"name": pod.name, "labels": dict(pod.labels), "annotations": dict(pod.metadata.get("annotations", {}))}
    if pod.terminating:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "metadata": metadata,
        "spec": dict(pod.spec),
        "status": {"podIP": pod.address, "terminating": pod.terminating},
    }


def allowed_by(documents: Iterable[Document]) -> Any:
    """Return who may do what: what some Role of the release allows, for everybody with a token."""
    rules = [rule for role in of_kind(documents, "Role") for rule in role["rules"]]

    def allows(verb: str, plural: str, _namespace: str) -> bool:
        return any(verb in rule["verbs"] and plural in rule["resources"] for rule in rules)

    return allows


@contextmanager
def running_cluster(made: Installation, given: Given, folder: Path) -> Iterator[Cluster]:
    """Give the pods of an installation, not started; end what runs after the block."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(FakeKube(allows=allowed_by(made.documents))) as kube,
        portal.wrap_async_context_manager(NameServer.running()) as names,
    ):
        cluster = Cluster(made, given, folder, kube, names, portal)
        try:
            yield cluster
        finally:
            cluster.kill()
