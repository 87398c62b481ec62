"""Asks a pod over HTTP whether it is healthy and what it serves. Decides nothing."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from contextcache.model import ModelId
from gateway.endpoints import Health
from gateway.ports import Endpoint


class HttpProbe:
    """`GET /health` and `GET /v1/models` of a vLLM pod."""

    def __init__(self, session: aiohttp.ClientSession, *, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def __call__(self, endpoint: Endpoint) -> Health:
        """Return what the pod says. Never raises for what it does."""
        try:
            async with self._session.get(f"{endpoint.url}/health", timeout=self._timeout) as answer:
                if answer.status != 200:
                    return Health(healthy=False)
            async with self._session.get(f"{endpoint.url}/v1/models", timeout=self._timeout) as answer:
                models = _model_names(await answer.read()) if answer.status == 200 else frozenset[ModelId]()
            return Health(healthy=True, models=models)
        except (TimeoutError, aiohttp.ServerTimeoutError):
            return Health(healthy=False, certain=False)
        except aiohttp.ClientError:
            return Health(healthy=False)


def _model_names(body: bytes) -> frozenset[ModelId]:
    try:
        entries: Any = json.loads(body)["data"]
        return frozenset(str(entry["id"]) for entry in entries)
    except (KeyError, TypeError, ValueError):
        return frozenset()
