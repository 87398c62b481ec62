"""Rows of sessions, receipts and usage as Redis stores them. Pure.

A row's state is stored as `creating`, `ready` or `tombstone`. BUSY is not stored: a row is busy while its lease lives,
so the end of a lease needs no write. In the same way a row is expired from `expires_at_ms` on, swept or not.

Marks name earlier states of a transcript. Each commit mints a mark for the transcript as it leaves it, and cuts earlier
marks to the segments that it keeps. Segments never change in place: a caller that was told a mark has the leading
segments that the row still counts for it. A row has the marks of its last commits, behind the generation at which they
were written. At another generation they are void.

`scripts/row.lua` and `scripts/transcript.lua` have the rules by which rows change.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from enum import Enum
from typing import Any
from urllib.parse import quote, unquote

from context_manager import refusals
from context_manager.limits import SessionKey, check_receipt
from contextcache.errors import InvalidRequest
from contextcache.model import (
    SAVED_COUNTS,
    USAGE_COUNTS,
    CacheRef,
    CacheSessionMetadata,
    NewSession,
    SessionMode,
    SessionState,
    TtlPolicy,
    TurnReceipt,
    Usage,
)
from contextcache.terms import Terms

_MAX_DIGITS = 15
_SUM_DIGITS_MAX = 17
"""Digits of one shard's sum of a day: beyond any use, and the sum over all shards still fits into 64 bits."""
_ANY_HOLDER = "*"
NAMING_FIELDS = (
    *("state", "created_at_ms", "expires_at_ms", "lease_id", "lease_until_ms"),
    *("cache_ref", "previous_cache_ref"),
)
"""Fields that tell which KV a row names: without a client's metadata, the large part of a row."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A stored row: the session, its state CREATING or READY, and its lease."""

    session: CacheSessionMetadata
    lease_id: str
    """Empty when no turn holds the row."""
    lease_until_ms: int
    is_tombstone: bool

    def is_creating(self) -> bool:
        """Return whether the row waits for its first commit."""
        return self.session.state is SessionState.CREATING and not self.is_tombstone

    def is_there(self, now_ms: int) -> bool:
        """Return whether the row is creating or live at `now_ms`: neither expired nor abandoned."""
        is_abandoned = self.is_creating() and self.lease_until_ms <= now_ms
        return not (self.is_tombstone or is_abandoned or self.session.expires_at_ms <= now_ms)

    def names(self, cache_ref: CacheRef, *, now_ms: int) -> bool:
        """Return whether the session needs this KV, or may soon. A row with a running turn names all KV saved for it.

        An ended lease names nothing more, although its turn may still commit while no other turn takes the row. A turn
        commits right after its KV is sealed, and sidecars ask only about KV that was sealed long ago.
        """
        in_use = self.is_creating() or self._lease_lives(now_ms) or cache_ref in self.session.cache_refs
        return in_use and self.is_there(now_ms)

    def metadata_at(self, now_ms: int) -> CacheSessionMetadata:
        """Return the session as a caller sees it at `now_ms`: BUSY while a lease on a ready row lives."""
        if self.session.state is SessionState.READY and self._lease_lives(now_ms):
            return replace(self.session, state=SessionState.BUSY)
        return self.session

    def _lease_lives(self, now_ms: int) -> bool:
        return bool(self.lease_id) and self.lease_until_ms > now_ms


def row_of_reply(key: SessionKey, reply: Any) -> SessionRow:
    """Return the row of an HGETALL reply: a mapping from the client, a flat list from a script.

    Raises ContextCacheError for a damaged one.
    """
    pairs = reply.items() if isinstance(reply, Mapping) else zip(reply[::2], reply[1::2], strict=True)
    try:
        return _row_of_fields(key, {name.decode(): value.decode() for name, value in pairs})
    except (KeyError, ValueError) as exc:
        raise refusals.damaged() from exc


def row_of_values(key: SessionKey, values: Sequence[bytes | None] | None) -> SessionRow | None:
    """Return the row of an HMGET of NAMING_FIELDS; None where there is none.

    `values`: None when the key is no hash. Raises as `row_of_reply`.
    """
    if values is None:
        raise refusals.damaged()
    found = {name.encode(): value for name, value in zip(NAMING_FIELDS, values, strict=True) if value is not None}
    return row_of_reply(key, found) if found else None


def _row_of_fields(key: SessionKey, stored: Mapping[str, str]) -> SessionRow:
    """Return the row of a hash. A tombstone has only `state`, `created_at_ms` and `expires_at_ms`.

    Raises KeyError or ValueError for a damaged one.
    """
    is_tombstone = stored["state"] == "tombstone"

    def number(name: str) -> int:
        return _number(stored.get(name, "0"))

    session = CacheSessionMetadata(
        session_id=key.session_id,
        tenant=key.tenant,
        model_id=stored.get("model_id", ""),
        mode=SessionMode(stored.get("mode", SessionMode.SESSION.value)),
        state=SessionState.READY if is_tombstone else SessionState(stored["state"]),
        generation=number("generation"),
        cache_ref=stored.get("cache_ref", ""),
        previous_cache_ref=stored.get("previous_cache_ref", ""),
        holder=stored.get("holder", ""),
        created_at_ms=_number(stored["created_at_ms"]),
        expires_at_ms=_number(stored["expires_at_ms"]),
        ttl_s=number("ttl_s"),
        ttl_policy=TtlPolicy(stored.get("ttl_policy", TtlPolicy.FIXED.value)),
        num_tokens=number("num_tokens"),
        num_turns=number("num_turns"),
        mark=_newest_mark(stored.get("marks", ""), number("generation")),
        metadata=json.loads(stored.get("metadata", "{}")),
        holders=_holders(stored),
        forked_from=_forked_from(stored.get("forked_from", "")),
        parent=stored.get("parent", ""),
        **{name: _sum(stored.get(name, "0")) for name in SAVED_COUNTS},
    )
    return SessionRow(session, stored.get("lease_id", ""), number("lease_until_ms"), is_tombstone)


def _number(text: str) -> int:
    # The numbers that row.lua accepts.
    if not (len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit()):
        raise ValueError("the number is out of range")
    return int(text)


def _sum(text: str) -> int:
    """Return a sum of turns; 0 for a damaged one, because no turn depends on it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _SUM_DIGITS_MAX else 0


def _holders(stored: Mapping[str, str]) -> tuple[str, ...] | None:
    named, holder = stored.get("holders", _ANY_HOLDER), stored.get("holder", "")
    holders = tuple(named.split("\n")) if named else ()
    return None if named == _ANY_HOLDER or (holder and holder not in holders) else holders


def _forked_from(field: str) -> tuple[str, int] | None:
    source, _, generation = field.partition("@")
    return (source, _number(generation)) if source else None


def _newest_mark(field: str, generation: int) -> str:
    """Return the newest mark: the name of the whole transcript. Empty when it was written at another generation."""
    written_at, _, entries = field.partition(" ")
    if written_at != str(generation) or not entries:
        return ""
    mark, num_segments = entries.split(" ")[0].split(":")
    _number(num_segments)
    return mark


def new_mark() -> str:
    """Mint a mark: 48 random bits, which differ from the four others of the same session."""
    return secrets.token_urlsafe(6)


def stored_fields(value: NewSession | Terms) -> dict[str, Any]:
    """Return the fields of a value as a row stores them: metadata as JSON."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    for name, field in found.items():
        if isinstance(field, Enum):
            found[name] = field.value
        elif isinstance(field, Mapping):
            found[name] = json.dumps(dict(field), ensure_ascii=False, separators=(",", ":"))
    return found


def usage_text(usage: Sequence[Usage]) -> str:
    """Return usage as the scripts read it: `<key>@<model>:<name> <number>`, the model quoted as in a URL."""
    named = [(f"{one.key}@{quote(one.model)}" if one.model else one.key, one.counts) for one in usage]
    return " ".join(f"{of}:{name} {number}" for of, counts in named for name, number in counts.items() if number)


def usage_of_replies(replies: Iterable[Mapping[bytes, bytes] | None]) -> list[Usage]:
    """Return the sums over the shards. Damaged sums are left out."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for field, number in (pair for reply in replies for pair in (reply or {}).items()):
        named, _, name = field.decode(errors="replace").rpartition(":")
        key, _, model = named.partition("@")
        if name in USAGE_COUNTS and number.isdigit() and len(number) <= _SUM_DIGITS_MAX:
            sums.setdefault((key, unquote(model)), Counter())[name] += int(number)
    return [Usage(key, dict(counts), model) for (key, model), counts in sorted(sums.items())]


def receipt_text(receipt: TurnReceipt | None) -> str:
    """Return a receipt as the list stores it, its fields in their order; empty for none."""
    return "" if receipt is None else json.dumps(astuple(receipt), separators=(",", ":"))


def receipts_of_reply(reply: Iterable[bytes] | None) -> tuple[TurnReceipt, ...]:
    """Return the receipts of a list. Damaged ones are left out: nothing depends on them."""
    found = []
    for text in reply or ():
        with suppress(TypeError, ValueError, InvalidRequest):
            receipt = TurnReceipt(*json.loads(text))
            check_receipt(receipt)
            found.append(receipt)
    return tuple(found)
