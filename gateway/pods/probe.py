"""Asks a pod over HTTP whether it is healthy, what it serves and how much it has to do. Decides nothing."""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
from email.utils import parsedate_to_datetime
from typing import Any, TypedDict
from urllib.parse import quote

import aiohttp
from yarl import URL

from contextcache.clock import Clock, SystemClock
from contextcache.identity import IN_FLIGHT_HEADER, read_in_flight
from contextcache.model import ModelId
from contextcache.wire.tls import WatchedTls
from gateway.pods.endpoints import Health
from gateway.pods.state import Endpoint, EngineLoad

_RUNNING, _WAITING, _KV_USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_BY_REASON = "vllm:num_requests_waiting_by_reason"
"""vLLM 0.32 v1/metrics/loggers.py PrometheusStatLogger: gauges, one sample an engine core (data parallel rank)."""
LOAD_PATH = "/metrics/?" + "&".join(f"name[]={quote(name)}" for name in (_RUNNING, _WAITING, _BY_REASON, _KV_USAGE))
"""Only these: the whole page costs the pod's API server 9 ms, this one 0.4. The slash matters: without it vLLM answers
by a route that knows no names, with it by prometheus_client's own."""
_SAMPLE = re.compile(rb"^(vllm:\w+)(?:\{.*\})? ([^ \n]+)", re.MULTILINE)
_DEFERRED = re.compile(rf'^{_BY_REASON}\{{(?:.*,)?reason="deferred".*\}} ([^ \n]+)'.encode(), re.MULTILINE)
_PAGE_BYTES_MAX = 4 << 20
"""More than a whole page of vLLM's; what stands beyond it is not read."""


class HttpProbe:
    """`GET /health`, `/v1/models` and `/metrics` of a vLLM pod."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        timeout_s: float,
        tls: WatchedTls | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`tls`: how pods with an https URL are spoken to."""
        self._clock = SystemClock() if clock is None else clock
        self._session = session
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __call__(self, endpoint: Endpoint) -> Health:
        """Return what the pod says. Never raises for what it does; a healthy pod may keep the rest to itself."""
        try:
            arguments = tls_arguments(endpoint.url, self._tls)
            async with self._session.get(f"{endpoint.url}/health", timeout=self._timeout, **arguments) as answer:
                if answer.status != 200:
                    return Health(healthy=False)
                in_flight = answer.headers.get(IN_FLIGHT_HEADER)
                skew_s = clock_skew_s(answer.headers.get("date", ""), now_ms=self._clock.now_ms())
        except (TimeoutError, aiohttp.ServerTimeoutError):
            return Health(healthy=False, certain=False)
        except aiohttp.ClientError:
            return Health(healthy=False)
        models, load = await asyncio.gather(
            self._page(f"{endpoint.url}/v1/models"), self._page(endpoint.url + LOAD_PATH)
        )
        if models is None:
            return Health(healthy=False, certain=False)
        return Health(
            healthy=True,
            models=model_names(models),
            load=None if load is None else engine_load(load),
            tenants=None if in_flight is None else read_in_flight(in_flight),
            clock_skew_s=skew_s,
        )

    async def _page(self, url: str) -> bytes | None:
        """Return the beginning of a page, b"" for one that there is not, None when there was no answer in time."""
        try:
            arguments = tls_arguments(url, self._tls)
            async with self._session.get(URL(url, encoded=True), timeout=self._timeout, **arguments) as answer:
                if answer.status == 200:
                    return await _beginning(answer)
                return None if answer.status >= 500 else b""
        except (TimeoutError, aiohttp.ClientError):
            return None


class TlsArguments(TypedDict, total=False):
    """What aiohttp takes with each request to a pod."""

    ssl: ssl.SSLContext
    server_hostname: str


def tls_arguments(url: str, tls: WatchedTls | None) -> TlsArguments:
    """Return how `url` is spoken to over https: with this part's certificate, and the pods' name, not their address.

    Nothing for http, or where only the system's CAs are believed. A context that has changed gets connections of its
    own: aiohttp keeps them apart.
    """
    if tls is None or not url.startswith("https:"):
        return {}
    return {"ssl": tls.current().client_context, "server_hostname": tls.server_name}


def model_names(body: bytes) -> frozenset[ModelId]:
    """Return the models on a `/v1/models` page; none when it is no such page."""
    try:
        entries: Any = json.loads(body)["data"]
        return frozenset(str(entry["id"]) for entry in entries)
    except (KeyError, RecursionError, TypeError, ValueError):
        return frozenset()


def clock_skew_s(date: str, *, now_ms: int) -> float | None:
    """Return how far the clock behind a `Date` header, which has whole seconds, is ahead; None: there is none."""
    try:
        said_s = parsedate_to_datetime(date).timestamp()
    except (IndexError, OverflowError, TypeError, ValueError):
        return None
    return said_s - now_ms // 1000


def engine_load(page: bytes) -> EngineLoad:
    """Return what a page in Prometheus' text format says of the engine: requests of all ranks, the fullest one's KV."""
    found: dict[str, list[float]] = {_RUNNING: [0.0], _WAITING: [0.0], _KV_USAGE: [0.0]}
    for name, text in _SAMPLE.findall(page):
        samples, value = found.get(name.decode()), _number(text)
        if samples is not None and value is not None:
            samples.append(value)
    deferred = [value for text in _DEFERRED.findall(page) if (value := _number(text)) is not None]
    return EngineLoad(
        running=int(sum(found[_RUNNING])),
        waiting=int(sum(found[_WAITING])),
        kv_usage=min(1.0, max(found[_KV_USAGE])),
        deferred=int(sum(deferred)),
    )


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


async def _beginning(answer: aiohttp.ClientResponse) -> bytes:
    pieces: list[bytes] = []
    size_bytes = 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes >= _PAGE_BYTES_MAX:
            break
    return b"".join(pieces)[:_PAGE_BYTES_MAX]
