"""A client of the running gateway that measures: time to the first token, and what the answer says about itself.

One connection a request: none is reused that a restarted part has closed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.local.progress import StepFailed

_ERROR_CHARS = 500


@dataclass(slots=True)
class Answer:
    """One streamed completion, as the client saw it."""

    text: str = ""
    session_id: str = ""
    ttft_ms: float = 0.0
    """From sending the request to the first chunk that holds a choice."""
    arrivals_ms: list[float] = field(default_factory=list)
    """When each chunk that holds a choice came, from sending the request; a token, where the chunks say which they hold
    (`return_token_ids`): an engine that gets ahead of its API server has several in one."""
    total_ms: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens the engine computed now."""
        if self._context is not None:
            return int(self._context["computed_tokens"])
        return int(self.usage["prompt_tokens"]) - self.cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache: the context's, or the engine's own."""
        if self._context is not None:
            return int(self._context["cached_tokens"])
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def source(self) -> str:
        """Where the context's KV came from, or what was kept; for others `none`, or `device` for a prefix-cache hit."""
        if self._context is not None:
            return str(self._context["source"])
        if "x-context-source" in self.headers:
            return self.headers["x-context-source"]
        return "device" if self.cached_tokens else "none"

    @property
    def restore_ms(self) -> float | None:
        """How long the connector took to load KV, where it did."""
        return None if self._context is None else self._context.get("restore_ms")

    @property
    def _context(self) -> dict[str, Any] | None:
        return self.usage.get("context")


class GatewayClient:
    """Calls one gateway with one API key. Raises StepFailed for any answer that is not a success."""

    def __init__(self, url: str, key: str, *, timeout_s: float = 300.0) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            verify=False,
        )

    def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        """POST `body` as a streamed completion with usage and return the whole answer."""
        sent = dict(body) | {"stream": True, "stream_options": {"include_usage": True}}
        started_s = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=sent, headers=headers) as response:
                if not response.is_success:
                    response.read()
                    raise StepFailed(f"POST {path}: HTTP {response.status_code}: {response.text[:_ERROR_CHARS]}")
                return _read_stream(response, started_s)
        except httpx.HTTPError as exc:
            raise self._silent("POST", path, exc) from exc

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make one plain call and return its JSON."""
        status, parsed = self.try_call(method, path, body)
        if status != httpx.codes.OK:
            raise StepFailed(f"{method} {path}: HTTP {status}: {json.dumps(parsed)[:_ERROR_CHARS]}")
        return parsed

    def try_call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Make one plain call and return status and JSON, whatever the status."""
        try:
            response = self._http.request(method, path, json=body)
            return response.status_code, response.json()
        except (httpx.HTTPError, ValueError) as exc:
            raise self._silent(method, path, exc) from exc

    def _silent(self, method: str, path: str, exc: Exception) -> StepFailed:
        return StepFailed(f"{method} {path}: no answer from {self._http.base_url}: {exc}")


def _read_stream(response: httpx.Response, started_s: float) -> Answer:
    answer = Answer(headers=dict(response.headers))
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        _take_chunk(answer, json.loads(data), started_s)
    answer.total_ms = (time.perf_counter() - started_s) * 1000
    if not answer.usage:
        raise StepFailed("the stream ended without usage")
    return answer


def _take_chunk(answer: Answer, chunk: dict[str, Any], started_s: float) -> None:
    if "error" in chunk:
        raise StepFailed(f"the stream broke: {json.dumps(chunk)[:_ERROR_CHARS]}")
    if choices := chunk.get("choices") or ():
        num_tokens = len(choices[0].get("token_ids") or ()) or 1
        answer.arrivals_ms += [(time.perf_counter() - started_s) * 1000] * num_tokens
        answer.ttft_ms = answer.arrivals_ms[0]
    for choice in choices:
        answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    answer.session_id = chunk.get("session_id") or answer.session_id
    answer.usage = chunk.get("usage") or answer.usage
