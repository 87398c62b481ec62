"""How sessions are stored in Redis: the names of keys, what is counted of them, and the Lua scripts.

All keys of one session carry the hash tag `{s<shard>}`, so they are in one Cluster slot. Tenant and id match the
patterns of contextcache.names, which contain neither ':' nor braces.

| key                                | type                        | holds                                         |
| ---------------------------------- | --------------------------- | --------------------------------------------- |
| cc:{s17}:session:<tenant>:<id>     | hash                        | the row (row.py)                              |
| cc:{s17}:transcript:<tenant>:<id>  | list                        | segments, oldest first (segments.py)          |
| cc:{s17}:trunk:<tenant>:<name>     | list                        | segments that forks share (trunks.lua)        |
| cc:{s17}:expiry                    | sorted set of <tenant>:<id> | score: when the sweep may take the session    |
| cc:{s17}:tenant:<tenant>           | sorted set of <id>          | score: created_at_ms; for lists and the quota |
| cc:sweeper                         | hash                        | claim of the manager that sweeps for all      |
| cc:{s17}:turns:<tenant>:<id>       | list                        | receipts of the last turns, oldest first      |
| cc:{s17}:place:<tenant>:<id>       | hash                        | created_at_ms of a removed session, for lists |
| cc:{s17}:answer:<tenant>:<id>:<key> | hash                       | the answer to a repeated request              |
| cc:bytes:<tenant>                  | hash of hour -> bytes       | the tenant's ledger, for its limit            |
| cc:{s17}:usage:<tenant>:<day>      | hash of sums                | usage on a day, by <key>@<model>:<count>      |
| cc:{s17}:counted:<tenant>:<sender> | hash                        | number of the sender's last counted batch     |

The ledger counts a tenant's bytes by the hour in which they end (scripts/bytes.lua). A Cluster has one for each shard,
`cc:{s17}:bytes:<tenant>`.

The expiry score of a CREATING row is the end of its lease, of any other row the end of its life. A tombstone is a hash
with `state`, `created_at_ms` and `expires_at_ms` alone, in neither sorted set.

Redis expires every key. A tombstone and a place last as long as expired sessions are remembered. Row and transcript
last that time and KEY_GRACE_MS beyond the row's expiry score. A set lasts as long as the last of its members, or
longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec

from context_manager.limits import SessionKey
from contextcache.model import BRANCH_LEASE_ID, SAVED_COUNTS, TURNS_KEPT, TenantId
from contextcache.names import SESSION_ID_PATTERN, TENANT_PATTERN, shard_of

HOUR_MS = 3_600_000
"""Bytes count until the hour in which they end is over."""
DAY_MS = 86_400_000
ANSWER_KEPT_MS = DAY_MS
"""Time for which a request that was committed does not run again."""
USAGE_KEPT_MS = 400 * DAY_MS
"""More than a year, so that a year can be compared with the one before."""
KEY_GRACE_MS = DAY_MS
"""Time for which Redis keeps a key after the end of its content and of its tombstone, in case all managers are away
(ADR 0029)."""
BATCH_KNOWN_MS = 600_000
"""Time for which a batch of usage without a sender is known: ten minutes. It comes again within seconds, or never. The
number of a sender is known for a day."""
TENANT_BYTES_MAX = 128 << 20
"""Default limit of a tenant's bytes: a quarter of the chart's Valkey (512 MB), so that one tenant cannot fill it."""
CONTEXT_BYTES = 4096
"""Bytes counted for a context beside its segments and metadata: row, receipts and entries in sets take 1 to 4 KB."""
SEGMENT_BYTES = 16
"""Bytes counted for a segment beside its own: the entry of the list."""
ANSWER_BYTES = 512
"""Bytes counted for a kept answer beside its own: the key and the digest of the request."""
PLACE_BYTES = 256
"""Bytes counted for a tombstone or a place in lists, for as long as it is remembered."""
RUNS_MAX = 32
"""Changes of rhythm that a row remembers of its generations, some 14 characters each (transcript.lua)."""
MARKS_CHARS_MAX = 64
"""Redis keeps a small hash in one compact piece as long as no value is longer (hash-max-listpack-value)."""
HOLDERS_MAX = 16
"""Maximum number of endpoints that a row names. Of a session with more, any endpoint may have KV."""
TRUNKS_MAX = 16
"""Maximum number of trunks that one row names. A fork of a deeper row copies its transcript, and begins with none."""
LENGTHS_MAX = 256
"""Maximum number of lengths at which one trunk is shared: each is 20 bytes that every fork and delete reads and writes.
"""
_NUMBERS = {
    "RUNS_MAX": RUNS_MAX,
    "MARKS_CHARS_MAX": MARKS_CHARS_MAX,
    "HOLDERS_MAX": HOLDERS_MAX,
    "TRUNKS_MAX": TRUNKS_MAX,
    "LENGTHS_MAX": LENGTHS_MAX,
    "ANSWER_KEPT_MS": ANSWER_KEPT_MS,
    "USAGE_KEPT_MS": USAGE_KEPT_MS,
    "TURNS_KEPT": TURNS_KEPT,
    "CONTEXT_BYTES": CONTEXT_BYTES,
    "SEGMENT_BYTES": SEGMENT_BYTES,
    "ANSWER_BYTES": ANSWER_BYTES,
    "PLACE_BYTES": PLACE_BYTES,
}

SWEEPER_KEY = "cc:sweeper"
_READING_RULES = ("arguments", "standing")
_RULES = (*_READING_RULES, "bytes", "trunks", "row", "transcript", "answers", "usage")
_READING = ("get",)
_WRITING = (
    *("reserve", "admit", "begin", "note_holder", "renew", "commit", "share", "rewind", "abort", "touch", "unregister"),
    *("sweep", "claim", "count"),
)
CRASH_POINTS = tuple(f"manager.{script}.{when}" for script in _WRITING for when in ("before", "after"))
"""Every crash point of the manager: around each writing script, before Redis is called and after it answered.

With MANAGER_REDIS_WAIT_REPLICAS, `after` is also after the replicas' answer: script and WAIT travel together.
"""


def day_of(now_ms: int) -> int:
    """Return the day, UTC, counted from 1970-01-01."""
    return now_ms // DAY_MS


def session_keys(key: SessionKey, *, ledger: str) -> list[str]:
    """Return KEYS of the scripts about one session, in the order of arguments.lua."""
    tag, name = _tag(shard_of(key.tenant, key.session_id)), member(key)
    return [
        f"{tag}:session:{name}",
        f"{tag}:transcript:{name}",
        f"{tag}:expiry",
        f"{tag}:tenant:{key.tenant}",
        ledger,
        f"{tag}:turns:{name}",
        f"{tag}:place:{name}",
    ]


def session_key(key: SessionKey) -> str:
    """Return the name of a session's hash."""
    return _key("session", key)


def turns_key(key: SessionKey) -> str:
    """Return the name of the list of receipts of a session's last turns."""
    return _key("turns", key)


def place_key(key: SessionKey) -> str:
    """Return the name of the place that a removed session had in lists."""
    return _key("place", key)


def answer_key(key: SessionKey, repeat_key: str) -> str:
    """Return the key of the kept answer to a repeated request."""
    return f"{_key('answer', key)}:{repeat_key}"


def ledger_key(tenant: TenantId, shard: int | None) -> str:
    """Return the name of a tenant's ledger of bytes; `shard`: of a Cluster, None elsewhere."""
    return f"{'cc' if shard is None else _tag(shard)}:bytes:{tenant}"


def usage_key(shard: int, tenant: TenantId, day: int | str) -> str:
    """Return the name of a tenant's usage that a shard counted on a day. Scripts append the day to an empty one."""
    return f"{_tag(shard)}:usage:{tenant}:{day}"


def counted_key(shard: int, tenant: TenantId, sender: str) -> str:
    """Return the name of the number of a sender's last batch."""
    return f"{_tag(shard)}:counted:{tenant}:{sender}"


def expiry_key(shard: int) -> str:
    """Return the name of a shard's expiry set."""
    return f"{_tag(shard)}:expiry"


def tenant_key(shard: int, tenant: TenantId) -> str:
    """Return the name of the set of a tenant's sessions in one shard."""
    return f"{_tag(shard)}:tenant:{tenant}"


def member(key: SessionKey) -> str:
    """Return a session's name in the expiry set."""
    return f"{key.tenant}:{key.session_id}"


def key_of_member(name: bytes, *, shard: int) -> SessionKey | None:
    """Return the session named by a member of a shard's expiry set; None for a name that no session there can have."""
    tenant, _, session_id = name.decode(errors="replace").partition(":")
    if not (TENANT_PATTERN.fullmatch(tenant) and SESSION_ID_PATTERN.fullmatch(session_id)):
        return None
    return SessionKey(tenant, session_id) if shard_of(tenant, session_id) == shard else None


def _key(kind: str, key: SessionKey) -> str:
    return f"{_tag(shard_of(key.tenant, key.session_id))}:{kind}:{member(key)}"


def _tag(shard: int) -> str:
    # Redis Cluster hashes only the text in braces: all keys of a session are in one slot.
    return f"cc:{{s{shard}}}"


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text, and the SHA-1 that EVALSHA calls it by."""

    text: str
    sha: str


def script_arguments(arguments: Mapping[str, Any]) -> bytes:
    """Return ARGV[1] of a script: its arguments by name."""
    return msgspec.msgpack.encode(arguments)


def script_rules(*, grace_ms: int = KEY_GRACE_MS) -> str:
    """Return the text in front of every script. `grace_ms`: see KEY_GRACE_MS, 1 or more."""
    numbers = "".join(f"local {name} = {number:d}\n" for name, number in _NUMBERS.items())
    numbers += f"local GRACE_MS, BRANCH_LEASE = {grace_ms:d}, '{BRANCH_LEASE_ID}'\n"
    numbers += f"local SAVED_COUNTS = {{{', '.join(f'{name} = true' for name in SAVED_COUNTS)}}}\n"
    return numbers + "".join(map(_text, _RULES))


def load_scripts(*, grace_ms: int = KEY_GRACE_MS) -> dict[str, Script]:
    """Return every script by name, the rules in front of each. Reading scripts need few, and Redis runs all of them."""
    reading, writing = "".join(map(_text, _READING_RULES)), script_rules(grace_ms=grace_ms)
    texts = {name: reading + _text(name) for name in _READING} | {name: writing + _text(name) for name in _WRITING}
    # SHA-1 is Redis' name for a script, and protects nothing.
    return {
        name: Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        for name, text in texts.items()
    }


def _text(name: str) -> str:
    return (resources.files("context_manager") / "scripts" / f"{name}.lua").read_text()
