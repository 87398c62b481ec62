"""`Reflector`: a copy of the objects of a Kubernetes API server, kept by one list and the watches after it.

It works like client-go's tools/cache Reflector, with these promises:

- Every wait has a deadline.
- A failure leaves the copy as it was, and is retried with backoff.
- Only a valid list or a watch event removes an object.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from contextcache.clock import Clock
from contextcache.kubernetes.objects import (
    KubernetesError,
    KubernetesExpired,
    KubernetesForbidden,
    KubernetesObject,
    KubernetesUnauthorized,
    KubernetesUnavailable,
    Selection,
)
from gateway.metrics import Metrics

if TYPE_CHECKING:
    from contextcache.kubernetes.client import KubernetesApi

log = logging.getLogger(__name__)

_Read = TypeVar("_Read")

_WATCH_S = 60.0
"""Seconds of one watch. A new watch costs one request, and finds a connection that died silently."""
_SHORT_WATCH_S = 1.0
"""Seconds below which a watch without an event counts as failed."""
_DELAY_S, _REFUSED_DELAY_S, _DELAY_MAX_S = 0.2, 5.0, 30.0
"""Seconds between two tries: the first delay, the first delay after a refusal, and the longest."""
_STARTING_S = 60.0
"""Seconds for which a call that was allowed before and is refused now is retried soon. A starting API server refuses
valid accounts until it has read all Roles, for 12 to 26 s on a v1.36. After that the Role is missing."""
_STARTING_DELAY_MAX_S = 1.0
_RELIST_FAILURES = 3
"""Failures in a row after which the copy is listed anew: the resource version of the watch may be the cause."""
_REFUSED = {KubernetesForbidden.reason, KubernetesUnauthorized.reason}


class Reflector(Generic[_Read]):
    """Copies of the selected objects, by name, as `read` returns them."""

    def __init__(
        self,
        api: KubernetesApi,
        selection: Selection,
        read: Callable[[KubernetesObject], _Read],
        *,
        resync_s: float,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`read` reduces an object to the needed fields; any field may be absent."""
        self.objects: dict[str, _Read] = {}
        self.version = 0
        """Changes whenever the objects may have changed."""
        self.listed = False
        """True after the first list, even an empty one."""
        self.tried = asyncio.Event()
        """Set when the first list has arrived or failed."""
        self._api = api
        self._selection = selection
        self._resource = selection.resource
        self._read = read
        self._resync_s = resync_s
        self._metrics = metrics
        self._clock = clock
        self._resource_version = ""
        """Version from which to watch; empty: list first."""
        self._list_at = 0.0
        self._num_failures = 0
        self._failing_with: str | None = None
        """Reason of the last failure in metrics and the log; None: it works."""
        self._worked = False
        """True after a watch succeeded or the server was away: the Roles may then be right."""
        self._refused_since_s: float | None = None

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                await self._follow()
            except Exception as exc:  # noqa: BLE001 - the loop must survive, or no pod would come or go; it logs and counts
                reason = self._reason(exc)
                self._failed(exc, reason)
                await asyncio.sleep(self._delay_s(reason))

    async def _follow(self) -> None:
        """List if a list is due, then watch until the watch ends. Raises KubernetesError."""
        now_s = asyncio.get_running_loop().time()
        if not self._resource_version or now_s >= self._list_at:
            await self._list()
            self._list_at = now_s + self._resync_s
            self.tried.set()
        await self._watch(min(_WATCH_S, self._list_at - now_s))

    async def _list(self) -> None:
        found = await self._api.list(self._selection)
        self.objects = {_name(each): self._read(each) for each in found.objects}
        self._resource_version = found.resource_version
        self.listed = True
        self.version += 1
        self._heard()

    async def _watch(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        got_somewhere = False
        async with self._api.watch(
            self._selection, resource_version=self._resource_version, timeout_s=timeout_s
        ) as events:
            began_s = loop.time()
            try:
                async for event in events:
                    self._take(event.type, event.object)
                    got_somewhere = True
                    self._heard()
            finally:
                if got_somewhere or loop.time() - began_s >= _SHORT_WATCH_S:
                    self._works()
                    got_somewhere = True
        if not got_somewhere:
            raise KubernetesUnavailable("the watch ended immediately")
        self._heard()

    def _take(self, kind: str, subject: KubernetesObject) -> None:
        if kind == "DELETED":
            self.objects.pop(_name(subject), None)
            self.version += 1
        elif kind != "BOOKMARK":
            self.objects[_name(subject)] = self._read(subject)
            self.version += 1
        # Last: a watch after a failure then repeats the event that could not be read.
        self._resource_version = str(subject["metadata"]["resourceVersion"])

    def _heard(self) -> None:
        self._metrics.discovery_synced.labels(self._resource.plural).set(self._clock.now_ms() / 1000)

    def _works(self) -> None:
        self._num_failures = 0
        self._worked, self._refused_since_s = True, None
        if self._failing_with is not None:
            self._failing_with = None
            log.info("discovery recovered", extra={"resource": self._resource.plural})

    def _failed(self, exc: Exception, reason: str) -> None:
        self._metrics.discovery_failures.labels(self._resource.plural, reason).inc()
        self._num_failures += 1
        self.tried.set()
        if isinstance(exc, KubernetesExpired) or self._num_failures >= _RELIST_FAILURES:
            # An account that may list but not watch then lists again and again.
            self._resource_version = ""
        if isinstance(exc, KubernetesExpired) or self._failing_with == reason:
            return
        self._failing_with = reason
        log.warning("discovery failed, last known pods stay", extra=self._fields(exc, reason))

    def _reason(self, exc: Exception) -> str:
        """Return the reason for metrics: at first `starting` if the server allowed the call before, or was away."""
        if not isinstance(exc, KubernetesError):
            fields = {"resource": self._resource.plural}
            log.error("discovery failed by an internal fault", exc_info=exc, extra=fields)
            return "internal"
        if exc.reason not in _REFUSED:
            return exc.reason
        now_s = asyncio.get_running_loop().time()
        if self._refused_since_s is None:
            self._refused_since_s = now_s
            self._worked = self._worked or self._failing_with == KubernetesUnavailable.reason
        return "starting" if self._worked and now_s - self._refused_since_s < _STARTING_S else exc.reason

    def _fields(self, exc: Exception, reason: str) -> dict[str, object]:
        fields: dict[str, object] = {"resource": self._resource.plural, "error": str(exc)}
        if reason == "starting":
            fields["means"] = "the server refuses a call that it allowed before, as a starting API server does"
        if reason in _REFUSED:
            fields["needs"] = "a Role with the verbs list and watch, bound to this service account"
            fields["needs_on"] = f"{self._resource.plural} of {self._resource.group_version}"
            fields["needs_in"] = self._selection.namespace
        return fields

    def _delay_s(self, reason: str) -> float:
        first_s: float = _REFUSED_DELAY_S if reason in _REFUSED else _DELAY_S
        most_s = _STARTING_DELAY_MAX_S if reason == "starting" else _DELAY_MAX_S
        longest_s = min(first_s * 2.0 ** min(self._num_failures - 1, 16), most_s)
        # Jitter: all gateways lose the same server at the same time.
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def _name(subject: KubernetesObject) -> str:
    return str(subject["metadata"]["name"])
