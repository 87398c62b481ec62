"""LMCache's HTTP API without LMCache: server and coordinator as one ASGI application, one rank, chunks of 256 tokens.

Held to tests/contract/lmcache_contract.py like the real one. What the engine's connector would save, a test does
(`store`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

CHUNK_TOKENS = 256
SIZE_BYTES = 1024
SERVER, COORDINATOR = "http://server", "http://coordinator"


@dataclass
class FakeLMCache:
    """Holds names of chunks, no bytes."""

    instances: tuple[str, ...] = ("node-0",)
    stored: set[tuple[str, str]] = field(default_factory=set)
    """Salt and chunk hash."""
    locked: set[tuple[str, str]] = field(default_factory=set)
    """What the engine reads now."""
    pins: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: list[tuple[str, str]] = field(default_factory=list)
    failing: list[int] = field(default_factory=list)
    """Statuses of the next answers, whatever is asked."""

    def store(self, salt: str, token_ids: list[int]) -> None:
        self.stored |= set(_keys(salt, token_ids))

    def transport(self) -> httpx.ASGITransport:
        return httpx.ASGITransport(self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        method, path = scope["method"], scope["path"]
        self.calls.append((method, path))
        if self.failing:
            status, answer = self.failing.pop(0), {"detail": "as the test wants it"}
        else:
            status, answer = self._answer(method, path, json.loads(raw) if raw else {}, scope["query_string"])
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _answer(self, method: str, path: str, body: Any, query: bytes) -> tuple[int, Any]:
        keys = _keys(body["cache_salt"], body["token_ids"]) if "token_ids" in body else []
        match method, path:
            case "POST", "/cache/prefetches":
                if not keys:
                    return 202, {"chunks": 0, "status": "noop"}
                return 202, {"request_id": "1", "chunks": len(keys), "status": "submitted"}
            case "POST", "/cache/pins":
                self.pins.update(keys)
                return 200, {"requested": len(keys), "affected": len(keys), "status": "pinned"}
            case "DELETE", "/cache/pins":
                self.pins = +(self.pins - Counter(keys))
                return 200, {"requested": len(keys), "affected": len(keys), "status": "unpinned"}
            case "GET", "/instances":
                found = [{"instance_id": name, "ip": "server", "http_port": 80} for name in self.instances]
                return 200, {"instances": found}
            case "POST", "/cache/delete":
                if body["instance_id"] not in self.instances:
                    return 404, {"detail": "no MP server registered"}
                return 200, {"requested": len(keys), **self._delete(keys, but=self.locked | set(self.pins))}
            case "DELETE", "/cache/objects":
                # The server knows nothing of pins, which are the coordinator's.
                named = [(key["cache_salt"], key["chunk_hash_hex"]) for key in body["keys"]]
                return 200, self._delete(named, but=self.locked)
            case "POST", "/directory/lookup":
                return 200, {"chunks": len(keys), "results": [self._listed(key) for key in keys]}
            case "GET", "/directory/keys":
                offset = int(dict(pair.split("=") for pair in query.decode().split("&"))["offset"])
                page = sorted(self.stored)[offset : offset + 10_000]
                return 200, {"total": len(self.stored), "keys": [self._listed(key) for key in page]}
        return 404, {"detail": "Not Found"}

    def _delete(self, keys: list[tuple[str, str]], *, but: set[tuple[str, str]]) -> dict[str, Any]:
        held = set(keys) & self.stored & but
        self.stored -= set(keys) - held
        return {"affected": len(keys) - len(held), "deleted": len(keys) - len(held), "skipped": len(held), "ok": True}

    def _listed(self, key: tuple[str, str]) -> dict[str, Any]:
        name = {"cache_salt": key[0], "chunk_hash_hex": key[1], "model_name": "m", "kv_rank": 0, "object_group_id": 0}
        place = {"instance_id": self.instances[0], "tier": "l1", "size_bytes": SIZE_BYTES}
        return {"key": name, "placements": [place] if key in self.stored else []}


def _keys(salt: str, token_ids: list[int]) -> list[tuple[str, str]]:
    """Return the names of the whole chunks; each hash covers all before it."""
    ends = range(CHUNK_TOKENS, len(token_ids) + 1, CHUNK_TOKENS)
    return [(salt, hashlib.sha256(repr(token_ids[:end]).encode()).hexdigest()) for end in ends]
