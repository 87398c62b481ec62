"""Encryption of the shared store's objects: AES-256-GCM with a key per tenant, and names that reveal no content.

Keys are in a file, a mounted Secret. A changed file is read again.

    {"acme": [{"id": "2", "key": "<base64 of 32 bytes>"}, {"id": "1", "key": "…"}], "*": [{"id": "1", "key": "…"}]}

A tenant's first key writes, and all its keys read. `*` is for tenants without an entry; without `*` their KV stays out
of the store. The keys in use are derived from key and tenant, so tenants under `*` have different ones.

Rules:
1. No part of a key or of the file is in an error or a log line.
2. An object that cannot be decrypted is a miss, never an answer. It stays: the key may be missing in this pod alone.
3. A block's plain name follows from its tokens, so a reader of the store could look for a guessed text. The stored name
   is the key's HMAC of it: a tenant's contexts share blocks until the tenant gets a new key.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Base64Bytes, BaseModel, ConfigDict, StringConstraints, TypeAdapter, ValidationError

from contextcache.errors import KeyNotAtHand
from contextcache.model import TenantId
from contextcache.names import TENANT_PATTERN
from contextcache.process.reloaded import Reloaded, read_bounded
from kv_sidecar.tiers.store import Buffer

MAGIC = b"context-cache-sealed-1\n"
"""First bytes of an encrypted object; no safetensors file begins so."""
_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES, _ID_BYTES_MAX = 32, 12, 16, 32
OVERHEAD_BYTES_MAX = len(MAGIC) + 1 + _ID_BYTES_MAX + _NONCE_BYTES + _TAG_BYTES
_OTHERS = "*"
_FILE_BYTES_MAX = 16 << 20
"""Bytes of the key file: a hundred thousand tenants."""
_DERIVED_MAX = 4096
"""Tenants whose derived keys are remembered."""


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,32}$")]
    key: Base64Bytes


_FILE = TypeAdapter(dict[str, list[_Key]], config=ConfigDict(hide_input_in_errors=True))


@dataclass(frozen=True, slots=True, repr=False)
class TenantKey:
    """One key of one tenant."""

    id: str
    _cipher: AESGCM
    _names: bytes

    def hidden(self, file_name: str) -> str:
        """Return a file's name in the store: 64 hex digits, the same at each write with this key."""
        return hmac.digest(self._names, file_name.encode(), "sha256").hex()

    def encrypt(self, name: str, data: Buffer) -> Buffer:
        """Return an object that can be decrypted under this name alone."""
        head = MAGIC + bytes([len(self.id)]) + self.id.encode()
        nonce = os.urandom(_NONCE_BYTES)
        start = len(head) + _NONCE_BYTES
        written = bytearray(start + len(data) + _TAG_BYTES)
        written[:start] = head + nonce
        self._cipher.encrypt_into(nonce, data, head + name.encode(), memoryview(written)[start:])
        return written

    def decrypt(self, name: str, data: memoryview) -> Buffer:
        """Return the plain bytes. Raises KeyNotAtHand for another key's, another object's, or changed bytes."""
        start = len(MAGIC) + 1 + len(self.id)
        nonce = data[start : start + _NONCE_BYTES]
        try:
            return self._cipher.decrypt(nonce, data[start + _NONCE_BYTES :], bytes(data[:start]) + name.encode())
        except (InvalidTag, ValueError):
            raise KeyNotAtHand("the object cannot be decrypted: wrong key or changed bytes") from None


class StoreKeys:
    """Keys of a file; a broken new content changes nothing. Safe to use from several threads."""

    def __init__(self, path: Path, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises ValueError when it is broken, OSError when it cannot be read."""
        self._file = Reloaded(
            path, read=lambda: _derived_keys(_read(path)), name="store key file", monotonic_s=monotonic_s
        )

    def of(self, tenant: TenantId) -> Sequence[TenantKey]:
        """Return a tenant's keys, the writing one first. Without a key its KV stays out of the store."""
        return self._file.current()(tenant)


def _derived_keys(given: Mapping[str, Sequence[_Key]]) -> Callable[[TenantId], Sequence[TenantKey]]:
    """Return the look-up of a tenant's keys in one content of the file."""

    @lru_cache(_DERIVED_MAX)
    def keys_of(tenant: TenantId) -> Sequence[TenantKey]:
        return tuple(_derived(tenant, key) for key in given.get(tenant, given.get(_OTHERS, ())))

    return keys_of


def key_id_of(data: memoryview) -> str | None:
    """Return the id of an object's key, or None for a plain object."""
    start = len(MAGIC) + 1
    if bytes(data[: len(MAGIC)]) != MAGIC or len(data) < start:
        return None
    return bytes(data[start : start + data[start - 1]]).decode("ascii", "replace")


def opened(keys: Sequence[TenantKey] | None, name: str, data: memoryview) -> Buffer:
    """Return an object's plain bytes; `keys` None: the store is not encrypted.

    Raises KeyNotAtHand.
    """
    key_id = key_id_of(data)
    if keys is None:
        if key_id is not None:
            raise KeyNotAtHand("the object is encrypted, but this sidecar has no keys")
        return data
    if key_id is None:
        # Anyone with write access could have written a plain object.
        raise KeyNotAtHand("the object is not encrypted")
    key = next((key for key in keys if key.id == key_id), None)
    if key is None:
        raise KeyNotAtHand("this sidecar lacks the object's key")
    return key.decrypt(name, data)


def _read(path: Path) -> Mapping[str, Sequence[_Key]]:
    try:
        found = _FILE.validate_json(read_bounded(path, _FILE_BYTES_MAX))
    except ValidationError as exc:
        fault = exc.errors(include_input=False, include_url=False, include_context=False)[0]
        raise ValueError(f"the store's key file is not valid: {fault['type']}") from None
    for tenant, keys in found.items():
        if tenant != _OTHERS and not TENANT_PATTERN.fullmatch(tenant):
            raise ValueError("the store's key file has an invalid tenant name")
        if not keys or len({key.id for key in keys}) < len(keys):
            raise ValueError("a tenant in the store's key file has no key, or two keys of one id")
        if any(len(key.key) != _KEY_BYTES for key in keys):
            raise ValueError(f"a key in the store's key file must have {_KEY_BYTES} bytes")
    return found


def _derived(tenant: TenantId, key: _Key) -> TenantKey:
    def derive(purpose: str) -> bytes:
        info = f"context-cache store 1\0{purpose}\0{tenant}".encode()
        return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=info).derive(key.key)

    return TenantKey(key.id, AESGCM(derive("data")), derive("names"))
