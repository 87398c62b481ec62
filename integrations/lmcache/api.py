"""LMCache's HTTP API, by httpx alone: importing LMCache would move vLLM's own packages.

Read in lmcache 0.5.6 and seen running. Two servers: the MP server beside the engine, and the fleet's coordinator.

- `POST {server}/cache/prefetches` (v1/multiprocess/http_apis/cache_api.py): `{model_name, world_size, token_ids,
  cache_salt}` brings whole chunks from L2 into L1: 202 `{request_id, chunks, status: submitted}`, `{chunks: 0,
  status: noop}` for less than one; 503 until the model has its KV cache there. It holds nothing in place.
- `POST | DELETE {coordinator}/cache/pins` (v1/mp_coordinator/controllers/eviction_http_api.py): the same body; keeps L2
  objects from the coordinator's own eviction. Pins are counted: two need two unpins.
- `POST {coordinator}/cache/delete` (v1/mp_coordinator/http_apis/cache_api.py): the same body with `instance_id`, `tier`
  and `force`: `{requested, affected, skipped}`. It skips objects pinned in L2 or locked in L1.
- `GET {coordinator}/instances`: `{instances: [{instance_id, ip, http_port}]}`.
- `POST {coordinator}/directory/lookup`: the same body: `{results: [{key, placements: [{tier, size_bytes}]}]}`, as of
  the last events that servers with `--coordinator-event-reporting` have told; without, empty.
- `GET {coordinator}/directory/keys?offset&limit` (at most 10 000): all keys of the fleet, `{keys: [{key, placements:
  [{instance_id, size_bytes}]}]}`; no filter by salt.
- `DELETE {server}/cache/objects`: `{keys, tier, force}`: `{deleted, skipped, ok}`; 503 for tier `all` without an L2.

The server itself lists L2 only where its adapter can (only `s3` can), and L1 never. `model_name` is vLLM's `--model`,
not its served name; at most 1 000 000 token ids. There is no authentication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import httpx
import msgspec

from contextcache.errors import SidecarUnavailable

TOKENS_MAX = 1_000_000
"""lmcache 0.5.6 v1/multiprocess/cache_control/key_resolver.py MAX_TOKEN_IDS."""
_KEYS_A_PAGE = 10_000
_PAGES_MAX = 100
_KEYS_A_DELETE = 1_000
_PAUSE_S = 0.05
_TRY_AGAIN = frozenset({502, 503, 504})
_CONNECTIONS = httpx.Limits(max_connections=16, max_keepalive_connections=4)


@dataclass(frozen=True, slots=True)
class SaltedTokens:
    """Names KV as LMCache does: whole chunks of these tokens, under this salt."""

    salt: str
    token_ids: Sequence[int]
    """Token ids from the first on; those beyond TOKENS_MAX are not named."""


Answer = TypeVar("Answer")
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Instance(msgspec.Struct):
    """One MP server."""

    instance_id: str
    ip: str
    http_port: int


class _Instances(msgspec.Struct):
    instances: list[Instance]


class _Counts(msgspec.Struct):
    chunks: Count = 0
    skipped: Count = 0


class _Placement(msgspec.Struct):
    size_bytes: Count


class Listed(msgspec.Struct):
    """One object in the directory."""

    key: dict[str, Any]
    placements: list[_Placement]

    @property
    def size_bytes(self) -> int:
        """Bytes in all places."""
        return sum(place.size_bytes for place in self.placements)


class _Results(msgspec.Struct):
    results: list[Listed]


class _Keys(msgspec.Struct):
    keys: list[Listed]


@dataclass
class LMCacheApi:
    """Both servers' API. Connects at the first call. Every call has a deadline and raises SidecarUnavailable."""

    server_url: str
    coordinator_url: str
    model_name: str
    """As the engine registers its KV, like `world_size`."""
    world_size: int
    timeout_s: float
    """Seconds of a call with its retries."""
    transport: httpx.AsyncBaseTransport | None = None
    _client: httpx.AsyncClient | None = None

    async def prefetch(self, kv: SaltedTokens) -> int:
        """Bring KV into the server's memory; return the chunks that were asked for, 0: less than one."""
        return (await self._ask(_Counts, "POST /cache/prefetches", self._body(kv), at=self.server_url)).chunks

    async def pin(self, kv: SaltedTokens) -> None:
        """Keep KV from the coordinator's eviction. Counted, so never tried twice."""
        await self._ask(_Counts, "POST /cache/pins", self._body(kv), attempts=1)

    async def unpin(self, kv: SaltedTokens) -> None:
        """Take one pin back; without one it does nothing."""
        await self._ask(_Counts, "DELETE /cache/pins", self._body(kv), attempts=1)

    async def instances(self) -> list[Instance]:
        """Return the servers that the coordinator knows."""
        return (await self._ask(_Instances, "GET /instances")).instances

    async def delete(self, instance: Instance, kv: SaltedTokens) -> int:
        """Delete chunks in all tiers of one server; return the pinned or locked objects that are still there."""
        body = {**self._body(kv), "instance_id": instance.instance_id, "tier": "all", "force": False}
        return (await self._ask(_Counts, "POST /cache/delete", body)).skipped

    async def size_bytes(self, kv: SaltedTokens) -> int:
        """Return the bytes of KV in all places, as far as the coordinator has been told."""
        if not kv.token_ids:
            return 0
        answer = await self._ask(_Results, "POST /directory/lookup", self._body(kv))
        return sum(found.size_bytes for found in answer.results)

    async def keys_under(self, salt: str) -> list[Listed]:
        """Return all keys under a salt, as far as the coordinator has been told. Reads its whole directory, in pages.

        Raises SidecarUnavailable when that is more than a million keys.
        """
        keys: list[Listed] = []
        for page in range(_PAGES_MAX):
            call = f"GET /directory/keys?limit={_KEYS_A_PAGE}&offset={page * _KEYS_A_PAGE}"
            found = (await self._ask(_Keys, call)).keys
            keys += [listed for listed in found if listed.key.get("cache_salt") == salt]
            if len(found) < _KEYS_A_PAGE:
                return keys
        raise SidecarUnavailable("LMCache's directory is too large to search for a context")

    async def delete_keys(self, instance: Instance, keys: Sequence[Listed]) -> int:
        """Delete objects in all tiers of one server; return the locked ones. Their pins stay, without effect."""
        skipped, server = 0, f"http://{instance.ip}:{instance.http_port}"
        for start in range(0, len(keys), _KEYS_A_DELETE):
            body = {
                "keys": [listed.key for listed in keys[start : start + _KEYS_A_DELETE]],
                "tier": "all",
                "force": False,
            }
            skipped += (await self._ask(_Counts, "DELETE /cache/objects", body, at=server)).skipped
        return skipped

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _body(self, kv: SaltedTokens) -> dict[str, Any]:
        engine = {"model_name": self.model_name, "world_size": self.world_size}
        return {**engine, "token_ids": list(kv.token_ids[:TOKENS_MAX]), "cache_salt": kv.salt}

    async def _ask(
        self, kind: type[Answer], call: str, body: dict[str, Any] | None = None, *, at: str = "", attempts: int = 3
    ) -> Answer:
        """Return an answer; a connection that breaks, or a server that is away, is tried again.

        `call`: method and path; `at`: server, the coordinator by default.
        """
        method, path = call.split()
        url = f"{(at or self.coordinator_url).rstrip('/')}{path}"
        try:
            async with asyncio.timeout(self.timeout_s):
                for left in reversed(range(attempts)):
                    try:
                        answer = await self._open().request(method, url, json=body)
                    except httpx.TransportError:
                        if not left:
                            raise
                    else:
                        if not left or answer.status_code not in _TRY_AGAIN:
                            return _read(kind, answer)
                    await asyncio.sleep(_PAUSE_S)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as exc:
            raise SidecarUnavailable(f"no answer from LMCache before the deadline ({type(exc).__name__})") from exc
        raise AssertionError("at least one attempt")

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=self.timeout_s, limits=_CONNECTIONS, trust_env=False, transport=self.transport
            )
        return self._client


def _read(kind: type[Answer], answer: httpx.Response) -> Answer:
    if not answer.is_success:
        # Its words may quote the request.
        raise SidecarUnavailable(f"LMCache answered with status {answer.status_code} to {answer.request.url.path}")
    try:
        return msgspec.json.decode(answer.content, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SidecarUnavailable("LMCache's answer is not valid") from exc
