"""Tells the owner of a pod that was left alone, by an Event of its Deployment, StatefulSet or other controller.

Events are written beside the answers, never before them: the API server waits for a review, and an Event only informs.
An Event that cannot be written is counted and dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from contextcache.kubernetes.objects import (
    EVENTS,
    REPLICA_SETS,
    KubernetesError,
    KubernetesExists,
    KubernetesObject,
    Resource,
)
from pod_injector.metrics import InjectorMetrics
from pod_injector.not_injected import NotInjected

log = logging.getLogger(__name__)

_WAITING_MAX = 128
_NAME_LENGTH_MAX = 200
_COMPONENT = "context-cache-injector"


class EventWriter(Protocol):
    """Port that reads and creates objects. Implemented by KubernetesApi."""

    async def get(self, resource: Resource, namespace: str, name: str) -> KubernetesObject:
        """Return one object within a deadline. Raises KubernetesError."""
        ...

    async def create(self, resource: Resource, namespace: str, body: KubernetesObject) -> None:
        """Create one object within a deadline. Raises KubernetesError; KubernetesExists where its name is taken."""
        ...


@dataclass(frozen=True, slots=True)
class SkipEvent:
    """One Event to write, but for its time."""

    namespace: str
    about: Mapping[str, Any]
    """The object that `kubectl describe` shows it for: apiVersion, kind, name and, where it has one, uid."""
    reason: str
    message: str

    @property
    def body(self) -> dict[str, Any]:
        """The Event. A crowd of pods of one owner, left alone for one reason, is one Event: its name is theirs."""
        identity = "\n".join([*map(str, self.about.values()), self.reason])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        name = f"{self.about['name'][:_NAME_LENGTH_MAX].rstrip('.-')}.{digest}"
        return {
            "apiVersion": EVENTS.group_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": self.namespace},
            "involvedObject": {**self.about, "namespace": self.namespace},
            "type": "Warning",
            "reason": "ContextCacheNotInjected",
            "message": f"vLLM starts without context-cache ({self.reason}): {self.message}"[:1024],
            "source": {"component": _COMPONENT},
            "count": 1,
        }


def skip_event(request: Mapping[str, Any], pod: Mapping[str, Any], exc: NotInjected) -> SkipEvent | None:
    """Return the Event about a pod left alone; None for a dry run, or without an object to attach it to. Pure."""
    namespace, metadata = request.get("namespace"), pod["metadata"]
    # Without one there is no uid either, as nothing is stored yet: the pod is found by its name.
    itself = {"apiVersion": "v1", "kind": "Pod", "name": metadata.get("name")}
    owner = _controller(metadata) or itself
    if request.get("dryRun") or not namespace or not isinstance(owner.get("name"), str) or not owner["name"]:
        return None
    return SkipEvent(namespace, _reference(owner), exc.reason.value, exc.message)


def _controller(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the reference to the controller of an object."""
    owners = metadata.get("ownerReferences") or []
    return next((one for one in owners if isinstance(one, dict) and one.get("controller")), None)


def _reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    return {key: owner[key] for key in ("apiVersion", "kind", "name", "uid") if owner.get(key)}


class Announcer:
    """Writes Events one after the other; more than wait already are dropped."""

    def __init__(
        self,
        writer: EventWriter,
        metrics: InjectorMetrics,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._writer, self._metrics, self._now = writer, metrics, now
        self._waiting: asyncio.Queue[SkipEvent] = asyncio.Queue(_WAITING_MAX)

    def tell(self, event: SkipEvent) -> None:
        """Have an Event written soon; never waits."""
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._metrics.events.labels("dropped").inc()

    async def run(self) -> None:
        """Write what was told, until cancelled."""
        while True:
            event = await self._waiting.get()
            outcome = await self._written(event)
            self._metrics.events.labels(outcome).inc()

    async def _raised(self, event: SkipEvent) -> SkipEvent:
        """Return an Event of a ReplicaSet as an Event of its Deployment, where owners look."""
        if (event.about.get("apiVersion"), event.about.get("kind")) != (REPLICA_SETS.group_version, REPLICA_SETS.kind):
            return event
        try:
            found = await self._writer.get(REPLICA_SETS, event.namespace, event.about["name"])
        except KubernetesError as exc:
            log.info("event left on the ReplicaSet", extra={"namespace": event.namespace, "reason": exc.reason})
            return event
        metadata = found.get("metadata") or {}
        owner = _controller(metadata)
        is_same = metadata.get("uid") == event.about.get("uid")
        return replace(event, about=_reference(owner)) if is_same and owner and owner.get("name") else event

    async def _written(self, event: SkipEvent) -> str:
        event = await self._raised(event)
        at = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {**event.body, "firstTimestamp": at, "lastTimestamp": at}
        try:
            await self._writer.create(EVENTS, event.namespace, body)
        except KubernetesExists:
            return "known"
        except KubernetesError as exc:
            log.warning("event not written", extra={"namespace": event.namespace, "reason": exc.reason})
            return "failed"
        return "written"
