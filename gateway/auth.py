"""Whose API key it is: a file of key hashes, reloaded when it changes, or one tenant where there are no keys.

The file is JSON, `{"keys": [{"sha256": "<hex>", "tenant": "demo"}]}`; a key itself is never stored or logged.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from contextcache.clock import Clock
from contextcache.errors import Unauthorized
from contextcache.file_version import file_version
from contextcache.model import TENANT_PATTERN, TenantId
from gateway.metrics import Metrics

log = logging.getLogger(__name__)

DEFAULT_TENANT: TenantId = "default"
AUTHENTICATE = 'Bearer realm="context-cache"'
"""What a 401 says in `WWW-Authenticate`."""
_RECHECK_MS = 1000
"""Shortest time between two looks at the file."""
_FILE_BYTES_MAX = 16 << 20
"""A hundred thousand keys."""
_GONE = (0, 0, 0)
"""Version of a file that is not there."""
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    tenant: TenantId


class SingleTenant:
    """Everybody is one tenant: for a gateway that only its own machine can reach."""

    def tenant_of(self, authorization: str | None) -> TenantId:
        """Return the default tenant; a key, if any, is the engine's business."""
        del authorization
        return DEFAULT_TENANT


class KeyFile:
    """Keys from a file. A change takes effect within a second of the next request; a broken file changes nothing."""

    def __init__(self, path: Path, *, clock: Clock, metrics: Metrics) -> None:
        """Read the file. Raises ValueError when it is broken, OSError when it cannot be read."""
        self._path = path
        self._clock = clock
        self._metrics = metrics
        self._version: tuple[int, int, int] | None = file_version(path)
        self._failed_version: tuple[int, int, int] | None = None
        """Of a file that could not be read; None: the last one could."""
        self._checked_at_ms = clock.now_ms()
        self._keys = _read_keys(path)

    def tenant_of(self, authorization: str | None) -> TenantId:
        """Return the tenant of `Authorization: Bearer <key>`. Raises Unauthorized.

        Compares with every key in constant time, so that how long it takes says nothing about any of them.
        """
        self._reload_if_changed()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            self._metrics.auth_failures.inc()
            raise Unauthorized("an API key is needed: Authorization: Bearer <key>")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        tenant: TenantId | None = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                tenant = known.tenant
        if tenant is None:
            self._metrics.auth_failures.inc()
            raise Unauthorized("this API key is not known")
        return tenant

    def _reload_if_changed(self) -> None:
        now_ms = self._clock.now_ms()
        # A clock set back must not stop reloads, so any distance counts.
        if abs(now_ms - self._checked_at_ms) < _RECHECK_MS:
            return
        self._checked_at_ms = now_ms
        version = file_version(self._path)
        if version == self._version:
            return
        try:
            self._keys = _read_keys(self._path)
        except (OSError, ValueError) as exc:
            # It may be half written: read again until it is good, told once for each state it was seen in.
            if (version or _GONE) != self._failed_version:
                self._metrics.key_reload_failures.inc()
                log.warning("key file not reloaded, the last good keys stay", extra={"error": str(exc)})
            self._version, self._failed_version = None, version or _GONE
        else:
            self._version, self._failed_version = version, None
            log.info("key file reloaded", extra={"num_keys": len(self._keys)})


def hash_key(key: str) -> str:
    """Return what the key file holds of a key. Raises ValueError for an empty one."""
    if not key.strip():
        raise ValueError("the key is empty")
    return hashlib.sha256(key.strip().encode()).hexdigest()


def _read_keys(path: Path) -> tuple[_Key, ...]:
    try:
        parsed = json.loads(_read_file(path), object_pairs_hook=_without_repetition)
    except (RecursionError, ValueError) as exc:
        raise ValueError(f"{path} is not JSON, or too large") from exc
    entries = parsed.get("keys") if isinstance(parsed, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f'{path} has no list "keys"')  # noqa: TRY004 - a broken file is one kind of error
    keys = tuple(_read_key(path, number, entry) for number, entry in enumerate(entries, start=1))
    owners = {key.digest: key.tenant for key in keys}
    for number, key in enumerate(keys, start=1):
        if owners[key.digest] != key.tenant:
            raise ValueError(f"{path}: key {number} belongs to two tenants")
    return keys


def _read_file(path: Path) -> bytes:
    # Without waiting: a pipe under this name would stop the gateway for as long as nobody writes into it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a file")
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise ValueError("too large")
    return data


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object: which of the two counts would be anybody's guess")
    return found


def _read_key(path: Path, number: int, entry: object) -> _Key:
    digest, tenant = (entry.get("sha256"), entry.get("tenant")) if isinstance(entry, dict) else (None, None)
    if not isinstance(digest, str) or not _SHA256_HEX.fullmatch(digest.lower()):
        raise ValueError(f'{path}: key {number} has no "sha256" of 64 hex digits')
    if not isinstance(tenant, str) or not TENANT_PATTERN.fullmatch(tenant):
        raise ValueError(f'{path}: key {number} has no valid "tenant"')
    return _Key(bytes.fromhex(digest), tenant)
