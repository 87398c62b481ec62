"""API keys: a file of key hashes, reloaded when it changes, or a single tenant without keys.

The file is JSON: `{"keys": [{"sha256": "<hex>", "tenant": "demo", "name": "app", "context_mode": "replay", "usage":
"openai", "plain": "keep", "operator": true}]}`. Only the first two fields are required. No key is stored or logged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, Field, StrictBool, ValidationError

from contextcache.errors import Unauthorized
from contextcache.model import ContextMode, TenantId, UsageFormat
from contextcache.names import KEY_NAME_PATTERN, TENANT_PATTERN
from contextcache.process.reloaded import Reloaded, read_bounded
from gateway.kept import Plain
from gateway.metrics import Metrics

DEFAULT_TENANT: TenantId = "default"
AUTHENTICATE = 'Bearer realm="context-cache"'
"""Value of `WWW-Authenticate` in a 401."""
_BEARER_HEADER = "authorization"
_KEY_HEADER = "x-api-key"
"""Header with the key of Anthropic's clients."""
KEY_HEADERS = frozenset({_BEARER_HEADER, _KEY_HEADER})
"""Headers that may hold a key of ours. They never reach a pod."""
KEY_BYTES_MAX = 1024
"""Bytes of the longest valid key. It bounds the hashing that clients without a key can cause, here and in Envoy."""
_SPACES = " \t"
"""White space around a header's value (RFC 9110), also for Envoy's check. Other Unicode spaces are part of a key."""
KEY_NEEDED = "no API key: send Authorization: Bearer <key> or X-Api-Key: <key>"
KEY_UNKNOWN = "unknown API key"
_FILE_BYTES_MAX = 16 << 20
"""Size of a file with a hundred thousand keys."""
_NAME_CHARS = 8
"""Characters of a digest that name a key without a name."""


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


class _KeyEntry(BaseModel):
    """One entry of the key file."""

    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    tenant: str = Field(pattern=f"^(?:{TENANT_PATTERN.pattern})$")
    name: str = Field("", pattern=f"^(?:{KEY_NAME_PATTERN.pattern})?$")
    """Name of the key in usage reports; empty: the beginning of its digest."""
    context_mode: ContextMode | None = None
    usage: UsageFormat | None = None
    plain: Plain | None = None
    operator: StrictBool = False


_ANYBODY = Caller(DEFAULT_TENANT, operator=True)


class SingleTenant:
    """All callers are one tenant, for a gateway that only its own machine can reach."""

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Return the default tenant. A key in the headers may be for the engine."""
        del headers
        return _ANYBODY

    def key_names(self) -> Mapping[TenantId, Sequence[str]]:
        """Return the default tenant, which has no keys."""
        return {DEFAULT_TENANT: ()}


class KeyFile:
    """Keys from a file. While `run` runs, a change takes effect within a second; a broken file changes nothing."""

    def __init__(self, path: Path, *, metrics: Metrics) -> None:
        """Read the file. Raises ValueError for a broken file, OSError for an unreadable one."""
        self._metrics = metrics
        self.file = Reloaded(
            path, read=lambda: _Keys(_read_callers(path)), name="key file", on_failure=metrics.key_reload_failures.inc
        )

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Return the owner of the key in `Authorization: Bearer <key>` or `X-Api-Key: <key>`. Raises Unauthorized.

        Looks the digest up instead of comparing with every key. Its time could only tell how a digest compares with
        those in the file. A client cannot choose the digest of a guess, nor derive a key from a part of its digest.
        Python compares digests only if their 64-bit hashes, seeded per process, are equal.
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
        # Not stored by digest: keys without a name share one object per tenant.
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
    """Return the hash of a key for the key file. Raises ValueError for an invalid key."""
    data = key.strip().encode()
    if not data or b"," in data or len(data) > KEY_BYTES_MAX:
        raise ValueError(f"the key must have 1 to {KEY_BYTES_MAX} bytes and no comma")
    return hashlib.sha256(data).hexdigest()


def read_digests(path: Path) -> list[str]:
    """Return the hashes in a key file, in hex, for Envoy. Raises ValueError for a broken file, OSError."""
    return [digest.hex() for digest in _read_callers(path)]


def _key_in(headers: Mapping[str, str]) -> str:
    """Return the key in a request's headers. Raises Unauthorized.

    Two different keys are refused: another reader of the request may see only one of the headers.
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
    # A repeated header is joined with a comma.
    if not key or "," in key:
        raise Unauthorized(KEY_NEEDED)
    if len(key) > KEY_BYTES_MAX:
        raise Unauthorized(KEY_UNKNOWN)
    return key


def _read_callers(path: Path) -> dict[bytes, Caller]:
    """Return the callers of a key file by the digest of their key. Raises ValueError, OSError."""
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
            key = _KeyEntry.model_validate(entry)
        except ValidationError as exc:
            first = exc.errors(include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}: key {number} has a wrong field {where}: {first['msg']}") from None
        caller = Caller(key.tenant, key.context_mode, key.plain or Plain.OFF, key.usage, key.name, key.operator)
        if callers.setdefault(bytes.fromhex(key.sha256), known.setdefault(caller, caller)) != caller:
            raise ValueError(f"{path}: key {number} appears twice with different fields")
    return callers


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same name twice")
    return found
