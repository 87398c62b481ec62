"""The HTTP side of the webhook: `POST /mutate`, bounded in every direction."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field

from aiohttp import web

from contextcache.errors import InvalidRequest
from pod_injector.events import Announcer
from pod_injector.metrics import InjectorMetrics
from pod_injector.parts import PatchParts
from pod_injector.review import Verdict, review

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Webhook:
    """Answers reviews, so many at a time, each within a deadline."""

    parts: PatchParts
    metrics: InjectorMetrics
    max_body_bytes: int
    max_requests: int
    request_timeout_s: float
    announcer: Announcer | None = None
    """Tells owners of pods that were left alone; None: nobody is told but by annotation and warning."""
    draining: bool = False
    """Set when new connections should go elsewhere; what arrives is still answered."""
    answering: set[asyncio.Protocol] = field(default_factory=set, init=False)
    """Connections of the reviews that are read and answered."""

    async def mutate(self, request: web.BaseRequest) -> web.Response:
        """Answer one review; anything that is none gets a status that the API server takes for a failed webhook."""
        if len(self.answering) >= self.max_requests:
            return self._refused(503, "too many reviews in progress")
        self.answering.add(request.protocol)
        try:
            with self.metrics.review_seconds.time():
                async with asyncio.timeout(self.request_timeout_s):
                    body = await request.read()
            # In a thread: a pod of megabytes takes seconds, in which probes are to be answered.
            verdict = await asyncio.to_thread(_judged, body, self.parts)
        except TimeoutError:
            return self._refused(408, "the review did not arrive before its deadline")
        except web.HTTPRequestEntityTooLarge:
            return self._refused(413, f"the review is larger than {self.max_body_bytes} bytes")
        except InvalidRequest as exc:
            return self._refused(400, exc.message)
        finally:
            self.answering.discard(request.protocol)
        self._tell(verdict)
        return web.json_response(verdict.response())

    def app(self) -> web.Application:
        """Return the application of the webhook's port."""
        app = web.Application(client_max_size=self.max_body_bytes)
        app.router.add_post("/mutate", self.mutate)
        return app

    def _refused(self, status: int, message: str) -> web.Response:
        self.metrics.refused_requests.labels(str(status)).inc()
        log.warning("review refused", extra={"status": status, "reason": message})
        return web.json_response({"error": message}, status=status)

    def _tell(self, verdict: Verdict) -> None:
        self.metrics.reviews.labels(verdict.outcome).inc()
        if verdict.event is not None and self.announcer is not None:
            self.announcer.tell(verdict.event)
        log.info("pod reviewed", extra={"uid": verdict.uid, "outcome": verdict.outcome, "warning": verdict.warning})


def _judged(body: bytes, parts: PatchParts) -> Verdict:
    return review(_parsed(body), parts)


def _parsed(body: bytes) -> dict[str, object]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("the body is not JSON") from exc
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body is not a JSON object")
    return parsed
