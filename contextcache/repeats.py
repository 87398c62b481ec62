"""Requests that may be sent again: what a client calls one (`Idempotency-Key`), and when two are the same. Pure.

The key is the client's secret no more than its name for the request: it is kept as a digest, and so is the request,
which is as it came: another byte is another request. A create that names no context gets one whose id follows from the
key, so that whoever has the deployment's secret finds it again, and nobody else does.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from contextcache.errors import InvalidRequest
from contextcache.model import Repeatable, SessionId, TenantId

IDEMPOTENCY_HEADER = "idempotency-key"
REPLAYED_HEADER = "idempotent-replayed"
"""Stripe's name: on an answer that was given before."""
_KEY = re.compile(r"[\x20-\x7e]{1,255}", re.ASCII)


def read_repeatable(header: str | None, parts: Iterable[bytes]) -> Repeatable | None:
    """Return what names a request, of these parts; None: it may not be sent again. Raises InvalidRequest."""
    if header is None:
        return None
    if not _KEY.fullmatch(header):
        raise InvalidRequest("Idempotency-Key must have 1 to 255 printable ASCII characters", param="Idempotency-Key")
    request = hashlib.sha256()
    for part in parts:
        request.update(len(part).to_bytes(8, "little"))
        request.update(part)
    return Repeatable(hashlib.sha256(header.encode()).hexdigest()[:32], request.hexdigest()[:32])


def session_id_of(tenant: TenantId, key: str, secret: bytes) -> SessionId:
    """Return the id of the context that a request of this key creates: as hard to guess as any."""
    named = hmac.new(secret, f"repeatable create\x00{tenant}\x00{key}".encode(), hashlib.sha256)
    return f"ctx_{named.hexdigest()[:32]}"
