"""`Reflector`: a copy of what the Kubernetes API server has, kept by one list and watches after it.

As client-go's tools/cache Reflector, with these promises: every wait ends; whatever fails, the copy stays as it was and
the reflector tries again, ever more slowly; nothing but a valid list or a watch event removes an object.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Generic, TypeVar

from contextcache.clock import Clock
from contextcache.kubernetes.objects import (
    KubernetesError,
    KubernetesExpired,
    KubernetesForbidden,
    KubernetesObject,
    KubernetesReader,
    KubernetesUnauthorized,
    KubernetesUnavailable,
    Selection,
)
from gateway.metrics import Metrics

log = logging.getLogger(__name__)

_Read = TypeVar("_Read")

_WATCH_S = 60.0
"""One watch. Begun anew so often, a connection that died without a word is noticed soon; it costs one request."""
_SHORT_WATCH_S = 1.0
"""A watch that ends sooner and without an event got nowhere."""
_DELAY_S, _REFUSED_DELAY_S, _DELAY_MAX_S = 0.2, 5.0, 30.0
"""Between tries: at first, at first when it is not allowed, at most."""
_STARTING_S = 60.0
"""An API server that starts refuses valid accounts until it has read all Roles, 12 to 26 s on a v1.36. So what was
allowed once and is refused now is asked for again soon, for so long; refused for longer, the Role is gone."""
_STARTING_DELAY_MAX_S = 1.0
_RELIST_FAILURES = 3
"""So many failures in a row, and the copy is made anew: the version to go on from may be what fails."""
_REFUSED = {KubernetesForbidden.reason, KubernetesUnauthorized.reason}


class Reflector(Generic[_Read]):
    """The selected objects as `read` makes them, by name."""

    def __init__(
        self,
        api: KubernetesReader,
        selection: Selection,
        read: Callable[[KubernetesObject], _Read],
        *,
        resync_s: float,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`read` gets whole objects and keeps what it needs; it takes any field to be absent."""
        self.objects: dict[str, _Read] = {}
        self.version = 0
        """Another one whenever the objects may have changed."""
        self.listed = False
        """True once there was a list, even an empty one."""
        self.tried = asyncio.Event()
        """Set when the first list has come or failed."""
        self._api = api
        self._selection = selection
        self._resource = selection.resource
        self._read = read
        self._resync_s = resync_s
        self._metrics = metrics
        self._clock = clock
        self._resource_version = ""
        """Where to go on; empty: list first."""
        self._list_at = 0.0
        self._num_failures = 0
        self._failing_with: str | None = None
        """The reason, as metrics and the log have it."""
        self._worked = False
        """True once a watch did, or the server was away: then Roles may be as they should be."""
        self._refused_since_s: float | None = None

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                await self._follow()
            except KubernetesError as exc:
                reason = self._reason(exc)
                self._failed(exc, reason)
                await asyncio.sleep(self._delay_s(reason))
            except Exception as exc:
                # The loop must live: without it pods would come and go unseen.
                log.exception("discovery failed by an internal fault", extra={"resource": self._resource.plural})
                self._failed(exc, "internal")
                await asyncio.sleep(self._delay_s("internal"))

    async def _follow(self) -> None:
        """List when it is time, then watch until the watch ends. Raises KubernetesError."""
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
        # Only now: an event that cannot be read is asked for again.
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
            # So who may list and not watch lives by lists.
            self._resource_version = ""
        if isinstance(exc, KubernetesExpired) or self._failing_with == reason:
            return
        self._failing_with = reason
        log.warning("discovery failed, last known pods stay", extra=self._fields(exc, reason))

    def _reason(self, exc: KubernetesError) -> str:
        """Return why it failed; refused by a server that allowed it before or was away, it is `starting` at first."""
        if not isinstance(exc, KubernetesForbidden | KubernetesUnauthorized):
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
        # Spread out: all gateways lose the same server at the same time.
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def _name(subject: KubernetesObject) -> str:
    return str(subject["metadata"]["name"])
