"""The HTTP side of the webhook: `POST /mutate`, with bounds on bytes, time and concurrent reviews."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field

from aiohttp import web

from contextcache.errors import InvalidRequest
from pod_injector.metrics import InjectorMetrics
from pod_injector.parts import PatchParts
from pod_injector.review import Verdict, review
from pod_injector.settings import InjectorSettings

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Webhook:
    """Answers a bounded number of reviews at a time, each before its deadline."""

    parts: PatchParts
    metrics: InjectorMetrics
    settings: InjectorSettings
    answering: set[asyncio.Protocol] = field(default_factory=set, init=False)
    """Connections of the reviews in progress."""

    def app(self) -> web.Application:
        """Return the application of the webhook's port."""
        app = web.Application(client_max_size=self.settings.max_body_bytes)
        app.router.add_post("/mutate", self.mutate)
        return app

    async def mutate(self, request: web.BaseRequest) -> web.Response:
        """Answer one review. Any other body gets a status that the API server counts as a failed webhook."""
        if len(self.answering) >= self.settings.max_requests:
            return self._refused(503, "too many reviews in progress")
        self.answering.add(request.protocol)
        try:
            with self.metrics.review_seconds.time():
                async with asyncio.timeout(self.settings.request_timeout_s):
                    body = await request.read()
            # In a thread: a pod of megabytes takes seconds, and probes need an answer meanwhile.
            verdict = await asyncio.to_thread(_verdict_on, body, self.parts)
        except TimeoutError:
            return self._refused(408, "the review did not arrive before its deadline")
        except web.HTTPRequestEntityTooLarge:
            return self._refused(413, f"the review is larger than {self.settings.max_body_bytes} bytes")
        except InvalidRequest as exc:
            return self._refused(400, exc.message)
        finally:
            self.answering.discard(request.protocol)
        self.metrics.reviews.labels(verdict.outcome).inc()
        log.info("pod reviewed", extra={"uid": verdict.uid, "outcome": verdict.outcome, "warning": verdict.warning})
        return web.json_response(verdict.response())

    def _refused(self, status: int, message: str) -> web.Response:
        self.metrics.refused_requests.labels(str(status)).inc()
        log.warning("review refused", extra={"status": status, "reason": message})
        return web.json_response({"error": message}, status=status)


def _verdict_on(body: bytes, parts: PatchParts) -> Verdict:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("the body is not JSON") from exc
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body is not a JSON object")
    return review(parsed, parts)
