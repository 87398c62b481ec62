"""Signed tokens between processes: a client cannot forge the facts that they carry. Pure.

A token is `v1.<base64url of JSON>.<hex HMAC-SHA256>`. The MAC covers a purpose, so a token made for one use is refused
for another. The gateway signs an `Identity` into `x-context-identity`. The turn process signs a `KVTransfer` into
`kv_transfer_params`; the connector obeys nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from operator import itemgetter
from typing import TypeVar

import msgspec

from contextcache.errors import ForgedIdentity
from contextcache.model import CacheRef, ContextMode, ModelId, SessionId, TenantId, UsageFormat
from contextcache.names import KEPT_PREFIX

IDENTITY_HEADER = "x-context-identity"
UNROUTED_HEADER = "x-context-unrouted"
"""Set by Envoy on every request and removed by the gateway. A pod that sees it knows that the gateway was away and that
a fail-open route let the request through. Such a request may only be stateless."""
DESTINATION_HEADER = "x-gateway-destination-endpoint"
"""Chosen pod as `host:port`: Gateway API Inference Extension, endpoint picker protocol 1.0.0."""
TENANT_HEADER = "x-context-tenant"
"""Tag of the tenant (`tenant_tag`), on every request from the gateway to an engine. The pod counts by it."""
IN_FLIGHT_HEADER = "x-context-in-flight"
"""Header of a pod's `/health`: requests in flight of the busiest tenants, `tag=number,tag=number`."""
LIMITS_HEADER = "x-context-limits"
"""Header of a pod's `/health`: the pod limits tenants' requests or bytes in flight. It must then see each request."""
IN_FLIGHT_TENANTS_MAX = 64
"""Tenants in that header, which bounds its size. A tenant that is not listed has fewer requests than the listed."""
KV_TRANSFER_KEY = "context_cache"
"""Key inside vLLM's `kv_transfer_params` that holds a signed `KVTransfer`."""
COMPUTED_SOON = "computed_soon"
"""Reason in a connector's report: no load, because the engine computes the missing tokens in less time."""
SOON_MS = 4
"""Minimum duration of a load on a GPU: one question to the sidecar, one step that starts it, one that finds it done."""

_VERSION = "v1"
_IDENTITY = "identity"
_KV_TRANSFER = "kv-transfer"
_MAX_TOKEN_CHARS = 4096
_COUNT_DIGITS = 6
_TAG = re.compile(r"[0-9a-f]{16}")
_ALWAYS_SIGNED = frozenset({"tenant", "request_id", "session_id", "expires_at_ms", "load", "save"})
"""Fields that a token always has. Others are left out when they are empty, so an older release reads the token."""


@dataclass(frozen=True, slots=True)
class Standby:
    """Second ready pod of the same model and KV format: it continues an answer if the chosen pod's engine fails."""

    name: str
    """Name under which sessions remember the pod as their holder."""
    url: str
    """Root of its vLLM's HTTP API, without a trailing slash. For https the caller's own TLS settings apply."""
    sidecar: str = ""
    """gRPC address (`host:port`) of its sidecar; empty: it has none."""
    kv_at: str = ""
    """gRPC address of the chosen pod's sidecar, from which the standby's sidecar pulls the KV; empty: it has none."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller of a request, and the context that the request claims."""

    tenant: TenantId
    request_id: str
    expires_at_ms: int
    """Unix time in ms at which the header expires; minutes, not hours."""
    session_id: SessionId | None = None
    """Context to continue; None: the request creates one (`POST /v1/context`)."""
    context_mode: ContextMode | None = None
    """The key's default for requests without `context_mode`; None: it has none."""
    usage: UsageFormat | None = None
    """The key's default for the format of usage; None: it has none."""
    key: str = ""
    """Name of the API key, for usage; empty: the deployment has no keys."""
    kept: SessionId = ""
    """Group under which a plain request's KV is kept; empty: it is not kept."""
    beginning: str = ""
    """Hash of the prompt's beginning. Requests with the same hash share a prefix. Empty if unknown."""
    is_branch: bool = False
    """True: the context was made for this turn and is deleted with it, unless the turn commits (BRANCH_LEASE_ID)."""
    prefix_at: str = ""
    """Sidecar (`host:port`) of a pod that served this beginning; empty: the chosen pod did, or none is known."""
    issued_at_ms: int = 0
    """Unix time in ms by the gateway's clock; 0: unknown."""
    standby: Standby | None = None
    """Pod that continues the answer if this pod's engine fails; None: no pod can."""
    parent: SessionId = ""
    """Parent context of this conversation; empty: none, or unknown."""
    parent_refs: tuple[CacheRef, ...] = ()
    """KV of the parent, newest first. A new conversation may start from it."""
    background: bool = False
    """True: a new context's prompt is computed in pieces, so that other requests never wait for all of it."""


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """Order to the connector: the KV to load before, and to save after, one engine request."""

    tenant: TenantId
    session_id: SessionId
    """Context, or group of a kept request."""
    request_id: str
    load: tuple[CacheRef, ...]
    """KV to start from, best first; empty: load nothing."""
    save: CacheRef | None
    """Name to save under; None: save nothing."""
    expires_at_ms: int
    """Unix time in ms at which the saved KV expires."""
    save_again_tokens: int = 0
    """Prompt tokens that a turn without a commit saves again under the first name of `load`, if the sidecar lost that
    KV. No later request would restore it. 0: none."""
    traceparent: str = ""
    """Parent span of the load and the save (W3C Trace Context); empty: the turn is not traced."""
    beginning: str = ""
    """See Identity."""
    prefix_at: str = ""
    """See Identity."""
    retain_ms: int = 0
    """Minimum lifetime that the saved KV is to be promised; 0: none."""
    pinned: bool = False
    """Whether it is to be promised in memory too."""
    placements: tuple[str, ...] = ()
    """Placements of kept KV after its seal. A turn asks for its own when it waits for the seal."""

    @property
    def is_kept(self) -> bool:
        """Whether the request has no context."""
        return self.session_id.startswith(KEPT_PREFIX)


SignedT = TypeVar("SignedT", Identity, KVTransfer)


def sign_identity(identity: Identity, secret: bytes) -> str:
    """Return the value of the `x-context-identity` header."""
    return _sign(_IDENTITY, identity, secret)


def read_identity(token: str, secret: bytes) -> Identity:
    """Return the identity that the gateway signed, also an expired one. Raises ForgedIdentity."""
    return _verified(_IDENTITY, Identity, token, secret)


def sign_kv_transfer(transfer: KVTransfer, secret: bytes) -> str:
    """Return the token for `kv_transfer_params[KV_TRANSFER_KEY]`."""
    return _sign(_KV_TRANSFER, transfer, secret)


def verify_kv_transfer(token: str, secret: bytes) -> KVTransfer:
    """Return the order that the turn process signed. Raises ForgedIdentity."""
    return _verified(_KV_TRANSFER, KVTransfer, token, secret)


@lru_cache(maxsize=4096)
def tenant_tag(tenant: TenantId, secret: bytes) -> str:
    """Return the tag by which a pod counts a tenant's requests: 16 hex characters that hide the tenant's name."""
    return _mac("tenant-tag", tenant.encode(), secret)[:16]


def read_tag(header: str) -> str:
    """Return the tag in a `TENANT_HEADER`; empty if it is malformed."""
    return header if _TAG.fullmatch(header) else ""


def in_flight_header(counts: Mapping[str, int]) -> str:
    """Return the value of an `IN_FLIGHT_HEADER`."""
    most = nlargest(IN_FLIGHT_TENANTS_MAX, counts.items(), key=itemgetter(1))
    return ",".join(f"{tag}={count}" for tag, count in most)


def read_in_flight(header: str) -> dict[str, int]:
    """Parse an `IN_FLIGHT_HEADER`; malformed entries are left out."""
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
    """Return a `cache_salt` for one context, for a store that finds KV by salt and tokens alone (LMCache)."""
    return _mac("context-salt", f"{tenant}\x00{session_id}".encode(), secret)


def _sign(purpose: str, signed: Identity | KVTransfer, secret: bytes) -> str:
    facts = msgspec.to_builtins(signed).items()
    raw = msgspec.json.encode({name: fact for name, fact in facts if fact or name in _ALWAYS_SIGNED})
    body = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return f"{_VERSION}.{body}.{_mac(purpose, body.encode(), secret)}"


def _verified(purpose: str, kind: type[SignedT], token: str, secret: bytes) -> SignedT:
    version, _, rest = token.partition(".")
    body, _, mac = rest.partition(".")
    if len(token) > _MAX_TOKEN_CHARS or version != _VERSION or not token.isascii():
        raise ForgedIdentity("the token is not signed")
    if not hmac.compare_digest(mac, _mac(purpose, body.encode(), secret)):
        raise ForgedIdentity("the token's signature is wrong")
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=kind)
    except ValueError as exc:  # of base64 and msgspec alike
        raise ForgedIdentity(f"the {purpose} token lacks a field, or has a wrong one") from exc


def _mac(purpose: str, data: bytes, secret: bytes) -> str:
    if not secret:
        raise ForgedIdentity("no signing secret is set")
    return hmac.new(secret, purpose.encode() + b"\x00" + data, hashlib.sha256).hexdigest()
