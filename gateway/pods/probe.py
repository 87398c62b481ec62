"""Probes a pod over HTTP for its health, models and load. Decides nothing.

The turn process answers for the health, vLLM's included, and for the requests of each tenant. vLLM itself answers for
models and load. So a healthy pod has been reached at both addresses.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from contextcache.clock import Clock, SystemClock
from contextcache.identity import IN_FLIGHT_HEADER, LIMITS_HEADER, read_in_flight
from contextcache.model import ModelId
from contextcache.wire.tls import WatchedTls, tls_arguments
from gateway.pods.endpoints import Health
from gateway.pods.state import Endpoint, EngineLoad

_RUNNING, _WAITING, _KV_USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_BY_REASON = "vllm:num_requests_waiting_by_reason"
"""vLLM 0.32 v1/metrics/loggers.py PrometheusStatLogger: gauges, one sample an engine core (data parallel rank)."""
LOAD_PATH = "/metrics/?" + "&".join(f"name[]={quote(name)}" for name in (_RUNNING, _WAITING, _BY_REASON, _KV_USAGE))
"""Path of a page with these metrics only: it costs the pod's API server 0.4 ms, the whole page 9 ms. Without the slash
vLLM's own route answers, which ignores `name[]`; with it prometheus_client's does."""
_SAMPLE = re.compile(rb"^(vllm:\w+)(?:\{.*\})? ([^ \n]+)", re.MULTILINE)
_DEFERRED = re.compile(rf'^{_BY_REASON}\{{(?:.*,)?reason="deferred".*\}} ([^ \n]+)'.encode(), re.MULTILINE)
_PAGE_BYTES_MAX = 4 << 20
"""Bytes read of a page, more than vLLM's whole one has."""


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """`GET /health` of a pod's turn process, `/v1/models` and `/metrics` of its vLLM."""

    session: aiohttp.ClientSession
    _: KW_ONLY
    timeout_s: float
    tls: WatchedTls | None = None
    """For pods with an https URL."""
    clock: Clock = field(default_factory=SystemClock)

    async def __call__(self, endpoint: Endpoint) -> Health:
        """Return the pod's health. Never raises for a fault of the pod; a healthy one may lack models and load."""
        try:
            async with self._get(f"{endpoint.turn_url}/health") as answer:
                if answer.status != 200:
                    return Health(healthy=False)
                in_flight = answer.headers.get(IN_FLIGHT_HEADER)
                if in_flight is None and endpoint.sidecar:
                    # Not a turn process but vLLM, which would ignore a `session_id` (ADR 0112).
                    return Health(healthy=False)
                limits_tenants = LIMITS_HEADER in answer.headers
                skew_s = clock_skew_s(answer.headers.get("date", ""), now_ms=self.clock.now_ms())
            pages = (self._page(endpoint.url + path) for path in ("/v1/models", LOAD_PATH))
            models, load = await asyncio.gather(*pages)
        except (TimeoutError, aiohttp.ServerTimeoutError):
            return Health(healthy=False, certain=False)
        except aiohttp.ClientError:
            return Health(healthy=False)
        if models is None:
            return Health(healthy=False, certain=False)
        return Health(
            healthy=True,
            models=model_names(models),
            load=None if load is None else engine_load(load),
            runs_turns=in_flight is not None,
            tenants=None if in_flight is None else read_in_flight(in_flight),
            limits_tenants=limits_tenants,
            clock_skew_s=skew_s,
        )

    def _get(self, url: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        return self.session.get(URL(url, encoded=True), timeout=timeout, **tls_arguments(url, self.tls))

    async def _page(self, url: str) -> bytes | None:
        """Return the beginning of a page; b"": the pod has no such page; None: no answer in time, or a 5xx.

        Raises ClientConnectorError for a refused connection: the turn process answers, and vLLM is away.
        """
        try:
            async with self._get(url) as answer:
                if answer.status == 200:
                    return await answer.content.readexactly(_PAGE_BYTES_MAX)
                return None if answer.status >= 500 else b""
        except asyncio.IncompleteReadError as exc:
            return exc.partial  # the whole page
        except aiohttp.ClientConnectorError:
            raise
        except (TimeoutError, aiohttp.ClientError):
            return None


def model_names(body: bytes) -> frozenset[ModelId]:
    """Return the models on a `/v1/models` page; empty for any other page."""
    try:
        entries: Any = json.loads(body)["data"]
        return frozenset(str(entry["id"]) for entry in entries)
    except (KeyError, RecursionError, TypeError, ValueError):
        return frozenset()


def clock_skew_s(date: str, *, now_ms: int) -> float | None:
    """Return the sender's clock minus ours by a `Date` header, which has whole seconds; None: no valid date."""
    try:
        said_s = parsedate_to_datetime(date).timestamp()
    except (IndexError, OverflowError, TypeError, ValueError):
        return None
    return said_s - now_ms // 1000


def engine_load(page: bytes) -> EngineLoad:
    """Return the load on a page in Prometheus' text format: requests of all ranks, and the largest KV usage."""
    samples = _SAMPLE.findall(page)

    def values(metric: str) -> list[float]:
        return [_number(text) for name, text in samples if name.decode() == metric]

    return EngineLoad(
        running=int(sum(values(_RUNNING))),
        waiting=int(sum(values(_WAITING))),
        kv_usage=min(1.0, max(values(_KV_USAGE), default=0.0)),
        deferred=int(sum(map(_number, _DEFERRED.findall(page)))),
    )


def _number(text: bytes) -> float:
    """Return the number of a sample; 0 for NaN, an infinity, a negative number or text."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value >= 0 else 0.0
