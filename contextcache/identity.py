"""Signed tokens: what one part tells the next about a request, so that a client cannot say it instead.

Pure. A token is `v1.<base64url of canonical JSON>.<hex HMAC-SHA256>`; the MAC covers a purpose, so a token made
for one use is refused for another. The gateway signs an `Identity` into `x-context-identity`; the turn
middleware signs a `KVTransfer` into `kv_transfer_params`, which is all the connector obeys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from operator import itemgetter
from typing import Any

from contextcache.errors import ForgedIdentity
from contextcache.model import CacheRef, ContextMode, ModelId, SessionId, TenantId, UsageFormat
from contextcache.names import KEPT_PREFIX

IDENTITY_HEADER = "x-context-identity"
UNROUTED_HEADER = "x-context-unrouted"
"""Set by Envoy on every request and removed by the gateway: a pod that sees it knows that the gateway was away and a
fail-open route let the request through. Such a request may be stateless, and nothing else."""
DESTINATION_HEADER = "x-gateway-destination-endpoint"
"""Gateway API Inference Extension, endpoint picker protocol 1.0.0: the pod, as `host:port`."""
TENANT_HEADER = "x-context-tenant"
"""The tenant's tag (`tenant_tag`), on every request that the gateway sends to an engine: the pod counts by it."""
IN_FLIGHT_HEADER = "x-context-in-flight"
"""Header of a pod's `/health`: requests in flight of the tenants that have most, `tag=number,tag=number`."""
IN_FLIGHT_TENANTS_MAX = 64
"""Named in that header: its size is bounded, and a tenant that is not named has less than those."""
KV_TRANSFER_KEY = "context_cache"
"""Key inside vLLM's `kv_transfer_params` that holds a signed `KVTransfer`."""

_VERSION = "v1"
_IDENTITY = "identity"
_KV_TRANSFER = "kv-transfer"
_MAX_TOKEN_CHARS = 4096
_COUNT_DIGITS = 6
_TAG = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is calling, and which context the request claims."""

    tenant: TenantId
    request_id: str
    expires_at_ms: int
    """Unix time in ms after which the header is worthless; minutes, not hours."""
    session_id: SessionId | None = None
    """The context to continue; None: the request creates one (`POST /v1/context`)."""
    context_mode: ContextMode | None = None
    """What the key says of requests that name no `context_mode` themselves; None: it says nothing."""
    usage: UsageFormat | None = None
    """The same of how their usage counts."""
    key: str = ""
    """Name of the API key, for usage; empty: there are no keys."""
    kept: SessionId = ""
    """Group under which a plain request's KV is kept; empty: it is none, or is not kept."""
    beginning: str = ""
    """What requests with no context to go on with are called that begin like this one; empty: nothing."""
    is_branch: bool = False
    """The context was made for this turn and goes with it, unless it commits (BRANCH_LEASE_ID)."""
    prefix_at: str = ""
    """Sidecar (`host:port`) of a pod where such requests were served before; empty: this one, or none is known."""
    issued_at_ms: int = 0
    """Unix time in ms by the gateway's clock; 0: the gateway does not say."""


COMPUTED_SOON = "computed_soon"
"""Why a load was not made, in a connector's report: the engine had what is before it, and computes it in less time."""
SOON_MS = 4
"""What a load takes at least on a GPU: a question to the sidecar, a step that begins it and one that finds it done."""


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """What the connector shall load before, and save after, one engine request."""

    tenant: TenantId
    session_id: SessionId
    """Or the group of a request that is kept."""
    request_id: str
    load: tuple[CacheRef, ...]
    """KV to start from, best first; empty: load nothing."""
    save: CacheRef | None
    """Name to save under; None: save nothing."""
    expires_at_ms: int
    """Unix time in ms at which the saved KV becomes garbage."""
    save_again_tokens: int = 0
    """For a turn that commits nothing: how many tokens of its prompt to save under the first name of `load` when the
    sidecar has no KV under it any more; nobody else would ever bring it back. 0: none."""
    traceparent: str = ""
    """Span that the load and the save belong to (W3C Trace Context); empty: nobody traces this turn."""
    beginning: str = ""
    """See Identity."""
    prefix_at: str = ""
    """See Identity."""

    @property
    def is_kept(self) -> bool:
        """Whether it is of a request without a context."""
        return self.session_id.startswith(KEPT_PREFIX)


def sign_identity(identity: Identity, secret: bytes) -> str:
    """Return the value of the `x-context-identity` header."""
    payload = {
        "tenant": identity.tenant,
        "request_id": identity.request_id,
        "session_id": identity.session_id,
        "expires_at_ms": identity.expires_at_ms,
    }
    if identity.context_mode is not None:
        payload["context_mode"] = identity.context_mode.value
    if identity.usage is not None:
        payload["usage"] = identity.usage.value
    for name in ("key", "kept", "beginning", "prefix_at", "is_branch", "issued_at_ms"):
        if value := getattr(identity, name):
            payload[name] = value
    return _sign(_IDENTITY, payload, secret)


def verify_identity(token: str, secret: bytes, *, now_ms: int) -> Identity:
    """Return the identity that the gateway signed, if it has not expired. Raises ForgedIdentity."""
    identity = read_identity(token, secret)
    if identity.expires_at_ms <= now_ms:
        raise ForgedIdentity("the identity header has expired")
    return identity


def read_identity(token: str, secret: bytes) -> Identity:
    """Return the identity that the gateway signed, also an expired one. Raises ForgedIdentity."""
    payload = _verify(_IDENTITY, token, secret)
    try:
        return Identity(
            tenant=str(payload["tenant"]),
            request_id=str(payload["request_id"]),
            expires_at_ms=int(payload["expires_at_ms"]),
            session_id=None if payload["session_id"] is None else str(payload["session_id"]),
            context_mode=ContextMode(payload["context_mode"]) if "context_mode" in payload else None,
            usage=UsageFormat(payload["usage"]) if "usage" in payload else None,
            key=str(payload.get("key", "")),
            kept=str(payload.get("kept", "")),
            beginning=str(payload.get("beginning", "")),
            prefix_at=str(payload.get("prefix_at", "")),
            is_branch=bool(payload.get("is_branch", False)),
            issued_at_ms=int(payload.get("issued_at_ms", 0)),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ForgedIdentity("the identity header lacks a field") from exc


def sign_kv_transfer(transfer: KVTransfer, secret: bytes) -> str:
    """Return the token for `kv_transfer_params[KV_TRANSFER_KEY]`."""
    payload = {
        "tenant": transfer.tenant,
        "session_id": transfer.session_id,
        "request_id": transfer.request_id,
        "load": list(transfer.load),
        "save": transfer.save,
        "expires_at_ms": transfer.expires_at_ms,
    }
    if transfer.save_again_tokens:
        payload["save_again_tokens"] = transfer.save_again_tokens
    for name in ("traceparent", "beginning", "prefix_at"):
        if value := getattr(transfer, name):
            payload[name] = value
    return _sign(_KV_TRANSFER, payload, secret)


def verify_kv_transfer(token: str, secret: bytes) -> KVTransfer:
    """Return what the turn middleware signed. Raises ForgedIdentity."""
    payload = _verify(_KV_TRANSFER, token, secret)
    try:
        return KVTransfer(
            tenant=str(payload["tenant"]),
            session_id=str(payload["session_id"]),
            request_id=str(payload["request_id"]),
            load=tuple(str(ref) for ref in payload["load"]),
            save=None if payload["save"] is None else str(payload["save"]),
            expires_at_ms=int(payload["expires_at_ms"]),
            save_again_tokens=int(payload.get("save_again_tokens", 0)),
            traceparent=str(payload.get("traceparent", "")),
            beginning=str(payload.get("beginning", "")),
            prefix_at=str(payload.get("prefix_at", "")),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ForgedIdentity("the kv-transfer token lacks a field") from exc


@lru_cache(maxsize=4096)
def tenant_tag(tenant: TenantId, secret: bytes) -> str:
    """Return the tag by which a pod counts a tenant's requests: 16 hex characters that hide the tenant's name."""
    return _mac("tenant-tag", tenant.encode(), secret)[:16]


def read_tag(header: str) -> str:
    """Return the tag in a `TENANT_HEADER`; empty when it is none."""
    return header if _TAG.fullmatch(header) else ""


def in_flight_header(counts: Mapping[str, int]) -> str:
    """Return the value of an `IN_FLIGHT_HEADER`."""
    most = nlargest(IN_FLIGHT_TENANTS_MAX, counts.items(), key=itemgetter(1))
    return ",".join(f"{tag}={count}" for tag, count in most)


def read_in_flight(header: str) -> dict[str, int]:
    """Parse an `IN_FLIGHT_HEADER`; unreadable entries are left out."""
    pairs = (one.partition("=") for one in header.split(",", IN_FLIGHT_TENANTS_MAX)[:IN_FLIGHT_TENANTS_MAX])
    return {
        tag: int(count)
        for tag, _, count in pairs
        if read_tag(tag) and count.isdecimal() and len(count) <= _COUNT_DIGITS
    }


def cache_salt(tenant: TenantId, model_id: ModelId, secret: bytes) -> str:
    """Return vLLM's `cache_salt` for this tenant and model: 64 hex characters (vLLM >= 0.30 allows 128)."""
    return _mac("cache-salt", f"{tenant}\x00{model_id}".encode(), secret)


def context_salt(tenant: TenantId, session_id: SessionId, secret: bytes) -> str:
    """Return a `cache_salt` of one context's own, for a store that knows KV by salt and tokens alone (LMCache)."""
    return _mac("context-salt", f"{tenant}\x00{session_id}".encode(), secret)


def _sign(purpose: str, payload: dict[str, Any], secret: bytes) -> str:
    raw = json.dumps(payload, separators=(",", ":"), sort_keys=True).encode()
    body = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return f"{_VERSION}.{body}.{_mac(purpose, body.encode(), secret)}"


def _verify(purpose: str, token: str, secret: bytes) -> dict[str, Any]:
    version, _, rest = token.partition(".")
    body, _, mac = rest.partition(".")
    if len(token) > _MAX_TOKEN_CHARS or version != _VERSION or not token.isascii():
        raise ForgedIdentity("the token is not signed")
    if not hmac.compare_digest(mac, _mac(purpose, body.encode(), secret)):
        raise ForgedIdentity("the token's signature is wrong")
    try:
        payload = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (binascii.Error, ValueError) as exc:
        raise ForgedIdentity("the token is not signed") from exc
    if not isinstance(payload, dict):
        raise ForgedIdentity("the token is not signed")
    return payload


def _mac(purpose: str, data: bytes, secret: bytes) -> str:
    if not secret:
        raise ForgedIdentity("no signing secret is set")
    return hmac.new(secret, purpose.encode() + b"\x00" + data, hashlib.sha256).hexdigest()
