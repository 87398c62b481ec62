"""Signed identities as a pod with a given clock takes them."""

from __future__ import annotations

from contextcache.errors import ForgedIdentity
from contextcache.identity import Identity, read_identity


def verify_identity(token: str, secret: bytes, *, now_ms: int) -> Identity:
    """Return the identity that the gateway signed, if it has not expired. Raises ForgedIdentity."""
    identity = read_identity(token, secret)
    if identity.expires_at_ms <= now_ms:
        raise ForgedIdentity("the identity header has expired")
    return identity
