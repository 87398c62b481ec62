"""A person with an API key, before one of a stack's fronts."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.kit.stack import KEY, MODEL, Stack
from tests.kit.until import wait_until


class Caller:
    """Asks greedily for few tokens, unless told otherwise; an answer that is not 200 fails the test."""

    def __init__(self, stack: Stack, key: str = KEY, *, front: str = "envoy") -> None:
        self.stack = stack
        self.front = front
        self.url = {"envoy": stack.url, "http": stack.front_url}[front]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=300)
        self.engine = httpx.Client(base_url=stack.engine_urls[0], timeout=300)
        self.turn = httpx.Client(base_url=stack.turn_urls[0], timeout=300)

    def close(self) -> None:
        self.http.close()
        self.engine.close()
        self.turn.close()

    def create(self, **body: Any) -> dict[str, Any]:
        return self._ok(self.http.post("/v1/context", json=self.body(body)))

    def complete(self, **body: Any) -> dict[str, Any]:
        return self._ok(self.http.post("/v1/completions", json=self.body(body)))

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._ok(self.http.post("/v1/chat/completions", json=self.body(body)))

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Events of a streamed answer; `[DONE]` must come once and last."""
        with self.http.stream("POST", path, json=self.body(body) | {"stream": True}) as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line]
        assert lines.count("data: [DONE]") == 1
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def delete(self, session_id: str) -> None:
        assert self._ok(self.http.delete(f"/v1/context/{session_id}"))["status"] == "success"

    def get(self, session_id: str) -> dict[str, Any]:
        return self._ok(self.http.get(f"/v1/context/{session_id}"))

    def delete_all(self) -> None:
        while contexts := self._ok(self.http.get("/v1/context", params={"limit": 100}))["data"]:
            for context in contexts:
                self.delete(context["session_id"])

    def sealed(self, session_id: str) -> bool:
        """Return whether the context's KV is durable."""
        return self.get(session_id)["holder"]["state"] == "sealed"

    def wait_sealed(self, session_id: str) -> None:
        wait_until(lambda: self.sealed(session_id), what="the KV is durable", deadline_s=90)

    def forget_prefixes(self) -> None:
        """Empty the first engine's own prefix cache, so that the next answer is cold or restored."""
        self.stack.forget_prefixes(self.stack.engine_urls[:1])

    def body(self, more: dict[str, Any]) -> dict[str, Any]:
        return {"model": MODEL, "temperature": 0, "max_tokens": 8} | more

    @staticmethod
    def _ok(response: httpx.Response) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        return response.json()
