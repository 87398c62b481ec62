"""A client of the running gateway that measures: time to the first token, and what the answer says about itself.

Standard library only, one connection a request, so that nothing but the stack is timed.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.local.progress import StepFailed

_ERROR_CHARS = 500


@dataclass(slots=True)
class Answer:
    """One streamed completion, as the client saw it."""

    text: str = ""
    session_id: str = ""
    ttft_ms: float = 0.0
    """From sending the request to the first chunk that holds a choice."""
    total_ms: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens the engine computed now."""
        prompt = int(self.usage["prompt_tokens"])
        return prompt if self._context is not None else prompt - self.cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache: the context's, or the engine's own."""
        if self._context is not None:
            return int(self._context["cached_tokens"])
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def source(self) -> str:
        """Where the context's KV came from; for a stateless answer `none`, or `device` for a prefix-cache hit."""
        if self._context is not None:
            return str(self._context["source"])
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
        self._address = urllib.parse.urlsplit(url).netloc
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s

    def stream(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST `body` as a streamed completion with usage and return the whole answer."""
        sent = dict(body) | {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        try:
            started_s = time.perf_counter()
            response = self._request(connection, "POST", path, sent)
            if response.status != http.client.OK:
                raise _refused("POST", path, response)
            return _read_stream(response, started_s)
        except (OSError, http.client.HTTPException) as exc:
            raise StepFailed(f"POST {path}: no answer from {self._address}: {exc}") from exc
        finally:
            connection.close()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make one plain call and return its JSON."""
        status, parsed = self.try_call(method, path, body)
        if status != http.client.OK:
            raise StepFailed(f"{method} {path}: HTTP {status}: {json.dumps(parsed)[:_ERROR_CHARS]}")
        return parsed

    def try_call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Make one plain call and return status and JSON, whatever the status."""
        connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        try:
            response = self._request(connection, method, path, body)
            parsed: dict[str, Any] = json.loads(response.read())
            return response.status, parsed
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise StepFailed(f"{method} {path}: no answer from {self._address}: {exc}") from exc
        finally:
            connection.close()

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        connection.request(method, path, None if body is None else json.dumps(body), self._headers)
        return connection.getresponse()


def _read_stream(response: http.client.HTTPResponse, started_s: float) -> Answer:
    answer = Answer(headers={name.lower(): value for name, value in response.getheaders()})
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            break
        _take_chunk(answer, json.loads(data), started_s)
    answer.total_ms = (time.perf_counter() - started_s) * 1000
    if not answer.usage:
        raise StepFailed("the stream ended without usage")
    return answer


def _take_chunk(answer: Answer, chunk: dict[str, Any], started_s: float) -> None:
    if "error" in chunk:
        raise StepFailed(f"the stream broke off: {json.dumps(chunk)[:_ERROR_CHARS]}")
    for choice in chunk.get("choices") or ():
        if not answer.ttft_ms:
            answer.ttft_ms = (time.perf_counter() - started_s) * 1000
        answer.text += choice.get("text") or ""
    answer.session_id = chunk.get("session_id") or answer.session_id
    answer.usage = chunk.get("usage") or answer.usage


def _refused(method: str, path: str, response: http.client.HTTPResponse) -> StepFailed:
    return StepFailed(
        f"{method} {path}: HTTP {response.status}: {response.read()[:_ERROR_CHARS].decode(errors='replace')}"
    )
