"""Tells the owner of a pod that was left alone, by an Event of its ReplicaSet, StatefulSet or what else made it.

Beside the answers, never before them: the API server waits for a review, and an Event is only words. What cannot be
written is counted and forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from contextcache.kubernetes.objects import EVENTS, KubernetesError, KubernetesExists, KubernetesObject, Resource
from injector.metrics import InjectorMetrics
from injector.not_injected import NotInjected

log = logging.getLogger(__name__)

_WAITING_MAX = 128
_NAME_LENGTH_MAX = 200
_COMPONENT = "context-cache-injector"


class EventWriter(Protocol):
    """What creates objects. Implemented by KubernetesApi."""

    async def create(self, resource: Resource, namespace: str, body: KubernetesObject) -> None:
        """Create one object within a deadline. Raises KubernetesError; KubernetesExists where its name is taken."""
        ...


@dataclass(frozen=True, slots=True)
class SkipEvent:
    """One Event to write, but for its time."""

    namespace: str
    body: Mapping[str, Any]


def skip_event(request: Mapping[str, Any], pod: Mapping[str, Any], exc: NotInjected) -> SkipEvent | None:
    """Return what to tell of a pod left alone; None for a dry run, or where there is nobody who could be told. Pure.

    One name for an owner and a reason: a crowd of pods is one Event, as long as the API server keeps it (an hour).
    """
    namespace, metadata = request.get("namespace"), pod["metadata"]
    owners = metadata.get("ownerReferences") or []
    # Without one there is no uid either, as nothing is stored yet: the pod is found by its name.
    itself = {"apiVersion": "v1", "kind": "Pod", "name": metadata.get("name")}
    owner = next((one for one in owners if isinstance(one, dict) and one.get("controller")), itself)
    if request.get("dryRun") or not namespace or not isinstance(owner.get("name"), str) or not owner["name"]:
        return None
    about = {key: owner[key] for key in ("apiVersion", "kind", "name", "uid") if owner.get(key)}
    identity = "\n".join([*map(str, about.values()), exc.reason.value])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return SkipEvent(
        namespace,
        {
            "apiVersion": EVENTS.group_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{owner['name'][:_NAME_LENGTH_MAX].rstrip('.-')}.{digest}", "namespace": namespace},
            "involvedObject": {**about, "namespace": namespace},
            "type": "Warning",
            "reason": "ContextCacheNotInjected",
            "message": f"vLLM starts without context-cache ({exc.reason.value}): {exc.message}"[:1024],
            "source": {"component": _COMPONENT},
            "count": 1,
        },
    )


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

    async def _written(self, event: SkipEvent) -> str:
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
