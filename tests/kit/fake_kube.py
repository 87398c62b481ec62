"""A Kubernetes API server for tests, on a loopback port: objects in memory, nothing acts on them.

Lists (quorum reads, in pages) and watches with resource versions, bookmarks and 410 for what was forgotten; creates,
updates, deletes with finalizers; label selectors; 401 and 403 by token. Held to the same suite as a real server
(tests/contract/test_kubernetes_api.py). Faults: `disconnect`, `forget`, `away`, `answer_with`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "fake-token"
_REFUSALS_OF_A_START = 4
KINDS = {"pods": "Pod", "endpointslices": "EndpointSlice", "secrets": "Secret", "events": "Event"}
GROUP_VERSIONS = {"pods": "v1", "secrets": "v1", "events": "v1", "endpointslices": "discovery.k8s.io/v1"}

Key = tuple[str, str, str]
"""Plural, namespace, name."""


class Refusal(Exception):
    """An answer that is a Status."""

    def __init__(self, code: int, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def status(self) -> dict[str, Any]:
        head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return head | {"reason": self.reason, "message": self.message, "code": self.code}


@dataclass
class Change:
    version: int
    key: Key
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    """None: deleted."""


@dataclass
class FakeKube:
    """`async with FakeKube() as kube`: serves on `kube.url` until the block ends."""

    allows: Callable[[str, str, str], bool] = lambda _verb, _plural, _namespace: True
    """RBAC: verb, plural, namespace."""
    bookmark_s: float = 0.2
    objects: dict[Key, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Verb and plural of each request that got as far as RBAC."""
    token: str = TOKEN
    tls: ssl.SSLContext | None = None
    port: int = 0
    version: int = 100
    page_objects: int = 10_000
    """Most objects in a page, whatever limit was asked for."""
    _log: list[Change] = field(default_factory=list)
    _oldest: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _transports: dict[web.StreamResponse, asyncio.Transport] = field(default_factory=dict)
    _instead: tuple[int, str, str] | None = None
    _refusals: int = 0
    """Requests that a server refuses that was away and has not read all Roles yet."""
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeKube:
        await self.back()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.away()

    async def back(self) -> None:
        """Listen, on the same port as before; objects are as they were."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def away(self) -> None:
        """Refuse connections and break those there are. Back again, it first forbids what its Roles allow."""
        self._refusals = _REFUSALS_OF_A_START
        runner, self._runner = self._runner, None
        if runner is not None:
            self.disconnect()
            await runner.cleanup()

    def disconnect(self) -> None:
        """Break off every watch, without an end."""
        for transport in list(self._transports.values()):
            transport.abort()

    async def forget(self) -> None:
        """Compact: who was not told of a change yet gets 410."""
        async with self._changed:
            self._oldest = self.version
            self._log.clear()
            self._changed.notify_all()

    def answer_with(self, status: int = 0, body: str = "", content_type: str = "text/html") -> None:
        """Answer every list with this from now on; status 0: as usual again."""
        self._instead = (status, body, content_type) if status else None

    def write_kubeconfig(self, path: Path, *, namespace: str = "ns", token: str | None = None) -> Path:
        """Write a file for `KUBECONFIG`; JSON is YAML."""
        user = {"token": self.token if token is None else token}
        context = {"cluster": "fake", "user": "fake", "namespace": namespace}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": user}],
            "contexts": [{"name": "fake", "context": context}],
        }
        path.write_text(json.dumps(content))
        return path

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Refusal as refusal:
            return web.json_response(refusal.status(), status=refusal.code)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        # api/v1/namespaces/NS/PLURAL[/NAME] or apis/GROUP/VERSION/namespaces/…
        parts = request.match_info["path"].split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        if len(parts) not in {3, 4} or parts[0] != "namespaces" or parts[2] not in KINDS:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        namespace, plural = parts[1], parts[2]
        name = parts[3] if len(parts) == 4 else ""
        verb = _verb(request, name)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if (scheme.lower(), token) != ("bearer", self.token):
            raise Refusal(401, "Unauthorized", "Unauthorized")
        self.requests.append((verb, plural))
        self._refusals = max(0, (refuses := self._refusals) - 1)
        if refuses or not self.allows(verb, plural, namespace):
            raise Refusal(403, "Forbidden", f'{plural} is forbidden: User "test" cannot {verb} resource "{plural}"')
        if verb == "list":
            return self._list(request, plural, namespace)
        if verb == "watch":
            return await self._watch(request, plural, namespace)
        body = await request.json() if request.can_read_body else {}
        key = (plural, namespace, name or body.get("metadata", {}).get("name", ""))
        status, found = await getattr(self, f"_{verb}")(key, body)
        return web.json_response(found, status=status)

    def _list(self, request: web.Request, plural: str, namespace: str) -> web.Response:
        if self._instead is not None:
            status, text, content_type = self._instead
            return web.Response(status=status, text=text, content_type=content_type)
        matches = label_selector(request.query.get("labelSelector", ""))
        version, _, after = request.query.get("continue", f"{self.version}:").partition(":")
        if int(version) < self._oldest:
            raise Refusal(410, "Expired", "The provided continue parameter is too old")
        found = [
            (key[2], found)
            for key, found in sorted(self.objects.items())
            if key[:2] == (plural, namespace) and matches(found) and key[2] > after
        ]
        limit = min(int(request.query.get("limit") or self.page_objects), self.page_objects)
        metadata = {"resourceVersion": version}
        if len(found) > limit:
            metadata["continue"] = f"{version}:{found[limit - 1][0]}"
        head = {"kind": f"{KINDS[plural]}List", "apiVersion": GROUP_VERSIONS[plural], "metadata": metadata}
        return web.json_response(head | {"items": [each for _, each in found[:limit]]})

    async def _watch(self, request: web.Request, plural: str, namespace: str) -> web.StreamResponse:
        matches = label_selector(request.query.get("labelSelector", ""))
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        assert request.transport is not None
        self._transports[answer] = request.transport
        loop = asyncio.get_running_loop()
        seen, end_s = int(request.query["resourceVersion"]), loop.time() + float(request.query["timeoutSeconds"])
        try:
            while True:
                if seen < self._oldest:
                    gone = Refusal(410, "Expired", f"too old resource version: {seen}")
                    await _send(answer, "ERROR", gone.status())
                    break
                for change in [change for change in self._log if change.version > seen]:
                    seen = change.version
                    if change.key[:2] == (plural, namespace):
                        await _send_change(answer, change, matches)
                if loop.time() >= end_s:
                    await self._bookmark(answer, plural, seen)
                    break
                if not await self._wait_for_change(seen, min(self.bookmark_s, max(0.01, end_s - loop.time()))):
                    await self._bookmark(answer, plural, seen)
            await answer.write_eof()
        except ConnectionError:
            # Broken off, by a test or by the client.
            pass
        finally:
            del self._transports[answer]
        return answer

    async def _wait_for_change(self, seen: int, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.version > seen)
        except TimeoutError:
            return False
        return True

    async def _bookmark(self, answer: web.StreamResponse, plural: str, seen: int) -> None:
        metadata = {"resourceVersion": str(seen), "creationTimestamp": None}
        bookmark = {"kind": KINDS[plural], "apiVersion": GROUP_VERSIONS[plural], "metadata": metadata}
        await _send(answer, "BOOKMARK", bookmark)

    async def _get(self, key: Key, _body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, self._stored(key)

    async def _create(self, key: Key, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if key in self.objects:
            raise Refusal(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
        metadata = body["metadata"] | {"uid": str(uuid.uuid4()), "namespace": key[1]}
        return 201, await self._store(key, body | {"metadata": metadata})

    async def _update(self, key: Key, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        old = self._stored(key)
        metadata = body.get("metadata") or {}
        kept = {name: old["metadata"][name] for name in ("uid", "namespace", "name")}
        if "deletionTimestamp" in old["metadata"]:
            kept["deletionTimestamp"] = old["metadata"]["deletionTimestamp"]
            if not metadata.get("finalizers"):
                return 200, await self._remove(key, old)
        return 200, await self._store(key, body | {"metadata": metadata | kept})

    async def _delete(self, key: Key, _body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        old = self._stored(key)
        # A pod that a scheduler may place has a kubelet to wait for, and there is none here.
        runs = key[0] == "pods" and not old.get("spec", {}).get("nodeSelector")
        if not old["metadata"].get("finalizers") and not runs:
            return 200, await self._remove(key, old)
        ending = old["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        return 200, await self._store(key, old | {"metadata": ending})

    def _stored(self, key: Key) -> dict[str, Any]:
        if key not in self.objects:
            raise Refusal(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    async def _store(self, key: Key, new: dict[str, Any]) -> dict[str, Any]:
        async with self._changed:
            self.version += 1
            new = copy.deepcopy(new) | {"kind": KINDS[key[0]], "apiVersion": GROUP_VERSIONS[key[0]]}
            new["metadata"]["resourceVersion"] = str(self.version)
            self._log.append(Change(self.version, key, self.objects.get(key), new))
            self.objects[key] = new
            self._changed.notify_all()
        return new

    async def _remove(self, key: Key, old: dict[str, Any]) -> dict[str, Any]:
        async with self._changed:
            self.version += 1
            last = old | {"metadata": old["metadata"] | {"resourceVersion": str(self.version)}}
            del self.objects[key]
            self._log.append(Change(self.version, key, last, None))
            self._changed.notify_all()
        return last


def label_selector(text: str) -> Callable[[dict[str, Any]], bool]:
    """Understand `key=value[,…]`, and `key` for any value."""
    wanted = [part.partition("=")[::2] for part in text.split(",") if part]

    def matches(found: dict[str, Any]) -> bool:
        labels = found["metadata"].get("labels") or {}
        return all(labels.get(key) == value if value else key in labels for key, value in wanted)

    return matches


def _verb(request: web.Request, name: str) -> str:
    if request.method == "GET":
        return "get" if name else "watch" if request.query.get("watch") in {"1", "true"} else "list"
    return {"POST": "create", "PUT": "update", "DELETE": "delete"}[request.method]


async def _send_change(answer: web.StreamResponse, change: Change, matches: Callable[[dict[str, Any]], bool]) -> None:
    """Tell of a change as one who sees only what the selector chooses sees it."""
    was, now = change.old is not None and matches(change.old), change.new is not None and matches(change.new)
    if now:
        await _send(answer, "MODIFIED" if was else "ADDED", change.new)
    elif was:
        assert change.old is not None
        # As a real server: the last state, at the version of its end.
        metadata = change.old["metadata"] | {"resourceVersion": str(change.version)}
        await _send(answer, "DELETED", change.old | {"metadata": metadata})


async def _send(answer: web.StreamResponse, kind: str, subject: Any) -> None:
    await answer.write(json.dumps({"type": kind, "object": subject}).encode() + b"\n")
