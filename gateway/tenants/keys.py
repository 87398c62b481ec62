"""Whose API key it is: a file of key hashes, reloaded when it changes, or one tenant where there are no keys.

The file is JSON, `{"keys": [{"sha256": "<hex>", "tenant": "demo", "name": "app", "context_mode": "replay", "usage":
"openai", "plain": "keep", "operator": true}]}`; all but the first two may be left out. A key itself is never stored or
logged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from contextcache.errors import Unauthorized
from contextcache.model import ContextMode, TenantId, UsageFormat
from contextcache.names import KEY_NAME_PATTERN, TENANT_PATTERN
from contextcache.process.reloaded import Reloaded, read_bounded
from gateway.kept import Plain
from gateway.metrics import Metrics

log = logging.getLogger(__name__)

_Choice = TypeVar("_Choice", bound=Enum)

DEFAULT_TENANT: TenantId = "default"
AUTHENTICATE = 'Bearer realm="context-cache"'
"""What a 401 says in `WWW-Authenticate`."""
_BEARER_HEADER = "authorization"
_KEY_HEADER = "x-api-key"
"""Where Anthropic's clients put their key."""
KEY_HEADERS = frozenset({_BEARER_HEADER, _KEY_HEADER})
"""Headers that hold a key of ours: they end here."""
KEY_BYTES_MAX = 1024
"""Longer ones are nobody's: who has no key chooses what is hashed here, and in Envoy."""
_SPACES = " \t"
"""Around a header's value (RFC 9110), for Envoy's check too; a space of another alphabet is part of a key."""
KEY_NEEDED = "no API key: send Authorization: Bearer <key> or X-Api-Key: <key>"
KEY_UNKNOWN = "unknown API key"
_FILE_BYTES_MAX = 16 << 20
"""A hundred thousand keys."""
_NAME_CHARS = 8
"""Of a digest that stands for the name of a key without one."""
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request, and the settings of their key."""

    tenant: TenantId
    context_mode: ContextMode | None = None
    """Default of requests that name no mode; None: the key sets none."""
    plain: Plain = Plain.OFF
    """Treatment of requests without a context."""
    usage: UsageFormat | None = None
    """Default format of usage; None: the key sets none."""
    key: str = ""
    """Name of the key in usage reports; empty: there are no keys."""
    operator: bool = False
    """True: the key may read the deployment, and the usage of any tenant."""


_ANYBODY = Caller(DEFAULT_TENANT, operator=True)


class SingleTenant:
    """Everybody is one tenant: for a gateway that only its own machine can reach."""

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Return the default tenant; a key, if any, is the engine's business."""
        del headers
        return _ANYBODY

    def key_names(self) -> Mapping[TenantId, Sequence[str]]:
        """Return the default tenant, which has none."""
        return {DEFAULT_TENANT: ()}


class KeyFile:
    """Keys from a file. While `run` runs, a change takes effect within a second; a broken file changes nothing."""

    def __init__(self, path: Path, *, metrics: Metrics) -> None:
        """Read the file. Raises ValueError when it is broken, OSError when it cannot be read."""
        self._metrics = metrics
        self.file = Reloaded(
            path, read=lambda: _Keys(_read_callers(path)), name="key file", on_failure=metrics.key_reload_failures.inc
        )

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Return whose key `Authorization: Bearer <key>` or `X-Api-Key: <key>` is. Raises Unauthorized.

        One look-up by digest, not a comparison with every key: what its time could tell is how a digest compares with
        those in the file, and nobody can choose the digest of a guess, nor find a key by part of its digest. Python
        compares digests only where their 64-bit hashes under a secret of this process are equal.
        """
        try:
            digest = hashlib.sha256(_key_in(headers).encode("utf-8", "surrogateescape")).digest()
            caller = self.file.value.callers[digest]
        except KeyError:
            self._metrics.auth_failures.inc()
            raise Unauthorized(KEY_UNKNOWN) from None
        except Unauthorized:
            self._metrics.auth_failures.inc()
            raise
        # Not kept under each digest: a hundred thousand callers of one tenant would be as many objects.
        return caller if caller.key else replace(caller, key=digest.hex()[:_NAME_CHARS])

    def key_names(self) -> Mapping[TenantId, Sequence[str]]:
        """Return the tenants in the order of their names, each with the names of its keys."""
        return self.file.value.names

    async def run(self) -> None:
        """Follow the file until cancelled."""
        await self.file.follow()


class _Keys:
    """Callers by the digest of their key, and the names of each tenant's keys."""

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self.callers, self.names = callers, _by_tenant(callers)


def _by_tenant(callers: Mapping[bytes, Caller]) -> dict[TenantId, list[str]]:
    found: dict[TenantId, list[str]] = {}
    for digest, caller in callers.items():
        found.setdefault(caller.tenant, []).append(caller.key or digest.hex()[:_NAME_CHARS])
    return dict(sorted(found.items()))


def hash_key(key: str) -> str:
    """Return what the key file holds of a key. Raises ValueError for what can be none."""
    data = key.strip().encode()
    if not data or b"," in data or len(data) > KEY_BYTES_MAX:
        raise ValueError(f"the key must have 1 to {KEY_BYTES_MAX} bytes and no comma")
    return hashlib.sha256(data).hexdigest()


def read_digests(path: Path) -> list[str]:
    """Return the hashes in a key file, in hex: what Envoy needs of it. Raises ValueError when it is broken, OSError."""
    return [digest.hex() for digest in _read_callers(path)]


def _key_in(headers: Mapping[str, str]) -> str:
    """Return the one key that a request's headers name. Raises Unauthorized.

    Strict, because another part that reads the request may see only one of two headers.
    """
    named = set()
    if _BEARER_HEADER in headers:
        scheme, _, key = headers[_BEARER_HEADER].partition(" ")
        named.add(key.strip(_SPACES) if scheme.lower() == "bearer" else "")
    if _KEY_HEADER in headers:
        named.add(headers[_KEY_HEADER].strip(_SPACES))
    if len(named) > 1:
        raise Unauthorized("Authorization and X-Api-Key carry different keys: send one key")
    key = named.pop() if named else ""
    # A comma joins headers that were sent twice.
    if not key or "," in key:
        raise Unauthorized(KEY_NEEDED)
    if len(key) > KEY_BYTES_MAX:
        raise Unauthorized(KEY_UNKNOWN)
    return key


def _read_callers(path: Path) -> dict[bytes, Caller]:
    """Return who calls with which key, by its digest."""
    try:
        parsed = json.loads(read_bounded(path, _FILE_BYTES_MAX), object_pairs_hook=_without_repetition)
    except (RecursionError, ValueError) as exc:
        raise ValueError(f"{path} is not JSON, or larger than {_FILE_BYTES_MAX} bytes") from exc
    entries = parsed.get("keys") if isinstance(parsed, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f'{path} has no list "keys"')  # noqa: TRY004 - a broken file is one kind of error
    callers: dict[bytes, Caller] = {}
    known: dict[Caller, Caller] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            digest, caller = _read_key(entry)
        except ValueError as exc:
            raise ValueError(f"{path}: key {number} {exc}") from None
        if callers.setdefault(digest, known.setdefault(caller, caller)) != caller:
            raise ValueError(f"{path}: key {number} appears twice with different fields")
    return callers


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _read_key(entry: object) -> tuple[bytes, Caller]:
    found = entry if isinstance(entry, dict) else {}
    digest, tenant = found.get("sha256"), found.get("tenant")
    if not isinstance(digest, str) or not _SHA256_HEX.fullmatch(digest.lower()):
        raise ValueError('has no "sha256" of 64 hex digits')
    if not isinstance(tenant, str) or not TENANT_PATTERN.fullmatch(tenant):
        raise ValueError('has no valid "tenant"')
    caller = Caller(
        tenant,
        context_mode=_choice(found, "context_mode", ContextMode),
        plain=_choice(found, "plain", Plain) or Plain.OFF,
        usage=_choice(found, "usage", UsageFormat),
        key=_name(found),
        operator=_flag(found, "operator"),
    )
    return bytes.fromhex(digest), caller


def _name(entry: dict[str, Any]) -> str:
    """Return what a key's usage is told under; empty: by the beginning of its digest. Raises ValueError."""
    name = entry.get("name", "")
    if not isinstance(name, str) or (name and not KEY_NAME_PATTERN.fullmatch(name)):
        raise ValueError('has a "name" that is not 1 to 64 letters, digits, "_", "-" or "."')
    return name


def _flag(entry: dict[str, Any], name: str) -> bool:
    said = entry.get(name, False)
    if not isinstance(said, bool):
        raise ValueError(f'has a "{name}" that must be true or false')  # noqa: TRY004 - a broken file is one kind
    return said


def _choice(entry: dict[str, Any], name: str, choices: type[_Choice]) -> _Choice | None:
    """Return which of the choices an entry names; None: it says nothing. Raises ValueError."""
    said = entry.get(name)
    try:
        return None if said is None else choices(said)
    except ValueError:
        raise ValueError(f'has a "{name}" that must be one of {", ".join(one.value for one in choices)}') from None
