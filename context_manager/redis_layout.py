"""How sessions lie in Redis: names of keys, rows in replies, the Lua scripts. The table is in store.py's docstring."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib import resources
from typing import Any

from context_manager import refusals
from context_manager.generations import RUNS_MAX
from context_manager.limits import check_receipt
from context_manager.session_row import SessionRow, row_from_fields
from context_manager.store import (
    ANSWER_BYTES,
    ANSWER_KEPT_MS,
    CONTEXT_BYTES,
    KEY_GRACE_MS,
    PLACE_BYTES,
    SEGMENT_BYTES,
    USAGE_KEPT_MS,
    SessionKey,
)
from contextcache.errors import InvalidRequest
from contextcache.model import BRANCH_LEASE_ID, TURNS_KEPT, USAGE_COUNTS, TenantId, TurnReceipt, Usage
from contextcache.names import SESSION_ID_PATTERN, TENANT_PATTERN, shard_of

NAMING_FIELDS = (
    *("state", "created_at_ms", "expires_at_ms", "lease_id", "lease_until_ms"),
    *("cache_ref", "previous_cache_ref"),
)
"""What it takes to tell which KV a row names: a client's metadata, the large part of a row, stays where it is."""

SWEEPER_KEY = "cc:sweeper"
"""There while one manager sweeps for all."""
_SUM_DIGITS_MAX = 17
"""Of what a shard counted on a day: beyond any use, and what all shards have together still fits into 64 bits."""
_RULES = ("bytes", "trunks", "row", "transcript", "answers", "usage")
_SCRIPTS = (
    *("reserve", "admit", "begin", "note_holder", "renew", "commit", "share", "rewind", "abort", "touch", "unregister"),
    *("sweep", "claim", "count"),
)
CRASH_POINTS = tuple(f"manager.{script}.{when}" for script in _SCRIPTS for when in ("before", "after"))
"""Every crash point of the manager: around each script, before Redis is asked and after it answered.

With MANAGER_REDIS_WAIT_REPLICAS, `after` is also after the replicas' answer: script and WAIT travel together.
"""


def session_key(key: SessionKey) -> str:
    """Return the name of a session's hash."""
    return f"{_tag(shard_of(key.tenant, key.session_id))}:session:{member(key)}"


def transcript_key(key: SessionKey) -> str:
    """Return the name of a session's list of segments."""
    return f"{_tag(shard_of(key.tenant, key.session_id))}:transcript:{member(key)}"


def turns_key(key: SessionKey) -> str:
    """Return the name of the list of receipts of a session's last turns."""
    return f"{_tag(shard_of(key.tenant, key.session_id))}:turns:{member(key)}"


def place_key(key: SessionKey) -> str:
    """Return the name of what is remembered of a removed session: where it was in the lists."""
    return f"{_tag(shard_of(key.tenant, key.session_id))}:place:{member(key)}"


def answer_key(key: SessionKey, repeat_key: str) -> str:
    """Return the key of the kept answer to a repeated request."""
    return f"{_tag(shard_of(key.tenant, key.session_id))}:answer:{member(key)}:{repeat_key}"


def ledger_key(tenant: TenantId, shard: int | None) -> str:
    """Return the name of a tenant's ledger of bytes; `shard`: of a Cluster, None elsewhere."""
    return f"{'cc' if shard is None else _tag(shard)}:bytes:{tenant}"


def usage_key(shard: int, tenant: TenantId, day: int) -> str:
    """Return the name of what a shard counted of a tenant on a day."""
    return f"{_tag(shard)}:usage:{tenant}:{day}"


def counted_key(shard: int, tenant: TenantId, sender: str) -> str:
    """Return the name of what says which batch of a sender was counted last."""
    return f"{_tag(shard)}:counted:{tenant}:{sender}"


def usage_text(usage: Sequence[Usage]) -> str:
    """Return usage as the scripts read it."""
    return " ".join(f"{one.key}:{name} {number}" for one in usage for name, number in one.counts.items() if number)


def receipt_text(receipt: TurnReceipt | None) -> str:
    """Return a receipt as it lies in the list, its fields in their order; empty for none."""
    return "" if receipt is None else json.dumps(astuple(receipt), separators=(",", ":"))


def receipts_of_reply(reply: Iterable[bytes] | None) -> tuple[TurnReceipt, ...]:
    """Return the receipts of a list; what is none of ours is left out: they are there to be looked at."""
    found = []
    for text in reply or ():
        with suppress(TypeError, ValueError, InvalidRequest):
            receipt = TurnReceipt(*json.loads(text))
            check_receipt(receipt)
            found.append(receipt)
    return tuple(found)


def usage_of_replies(replies: Iterable[Mapping[bytes, bytes] | None]) -> list[Usage]:
    """Return the sums over the shards; what is no sum of ours is left out."""
    by_key: dict[str, Counter[str]] = {}
    for field, number in (pair for reply in replies for pair in (reply or {}).items()):
        key, _, name = field.decode(errors="replace").rpartition(":")
        if name in USAGE_COUNTS and number.isdigit() and len(number) <= _SUM_DIGITS_MAX:
            by_key.setdefault(key, Counter())[name] += int(number)
    return [Usage(key, dict(counts)) for key, counts in sorted(by_key.items())]


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


def script_keys(key: SessionKey) -> list[str]:
    """Return KEYS of the scripts about one session: row, transcript, expiry set, tenant set."""
    shard = shard_of(key.tenant, key.session_id)
    return [session_key(key), transcript_key(key), expiry_key(shard), tenant_key(shard, key.tenant)]


def row_of_reply(key: SessionKey, reply: Any) -> SessionRow:
    """Return the row of an HGETALL reply: a mapping from the client, a flat list from a script.

    Raises ContextCacheError for one that is damaged.
    """
    pairs = reply.items() if isinstance(reply, Mapping) else zip(reply[::2], reply[1::2], strict=True)
    return _row(key, pairs)


def row_of_values(key: SessionKey, values: Sequence[bytes | None] | None) -> SessionRow | None:
    """Return what an HMGET of NAMING_FIELDS tells of a row; None where there is none.

    `values`: None when it is no hash. Raises as `row_of_reply`.
    """
    if values is None:
        raise refusals.damaged()
    names = (name.encode() for name in NAMING_FIELDS)
    pairs = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    return _row(key, pairs) if pairs else None


def _row(key: SessionKey, pairs: Iterable[tuple[bytes, bytes]]) -> SessionRow:
    try:
        fields = {name.decode(): value.decode() for name, value in pairs}
        return row_from_fields(key.tenant, key.session_id, fields)
    except (KeyError, ValueError) as exc:
        raise refusals.damaged() from exc


def _tag(shard: int) -> str:
    # The braces make Redis Cluster hash the shard alone: all keys of a session lie in one slot.
    return f"cc:{{s{shard}}}"


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text, and the SHA-1 that EVALSHA calls it by."""

    text: str
    sha: str


def load_scripts(*, grace_ms: int = KEY_GRACE_MS) -> dict[str, Script]:
    """Return every script by name, the rules in front of each; `grace_ms`: see KEY_GRACE_MS, 1 or more."""
    folder = resources.files("context_manager") / "scripts"
    numbers = f"local GRACE_MS, RUNS_MAX, ANSWER_KEPT_MS = {grace_ms:d}, {RUNS_MAX}, {ANSWER_KEPT_MS}\n"
    numbers += f"local USAGE_KEPT_MS, TURNS_KEPT = {USAGE_KEPT_MS}, {TURNS_KEPT}\n"
    numbers += f"local CONTEXT_BYTES, SEGMENT_BYTES = {CONTEXT_BYTES}, {SEGMENT_BYTES}\n"
    numbers += f"local ANSWER_BYTES, PLACE_BYTES = {ANSWER_BYTES}, {PLACE_BYTES}\n"
    numbers += f"local BRANCH_LEASE = '{BRANCH_LEASE_ID}'\n"
    rules = numbers + "".join((folder / f"{name}.lua").read_text() for name in _RULES)
    texts = {name: rules + (folder / f"{name}.lua").read_text() for name in _SCRIPTS}
    # SHA-1 is Redis's name for a script, nothing is protected by it.
    return {
        name: Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        for name, text in texts.items()
    }
