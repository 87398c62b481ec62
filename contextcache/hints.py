"""Cache hints of a request: vLLM's `kv_hints`, and the cache marks of Anthropic's and OpenAI's requests. Pure.

Most ask for one promise: a minimum lifetime of the KV that the request leaves, in memory too if it is pinned. Three
hints ask for a placement of that KV. Hints are answered. Marks are not, as in the APIs that they come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from contextcache.errors import InvalidRequest
from contextcache.model import Placement, SaveOutcome
from contextcache.terms import whole

RETAIN_MS_MAX = 86_400_000
"""Longest promise: a day, as long as hosted APIs keep a cache."""
ACTIONS_MAX = 16
PLACEMENTS = ("prefetch", "demote", "share")
_FAULT_CHARS_MAX = 200
_MARKS_MAX = 64
"""Places of each name that are read in one request, the first ones. Anthropic allows 4 marks, OpenAI considers 80."""
_NAMES = (b'"cache_control"', b'"prompt_cache_options"', b'"prompt_cache_retention"')
_MARK = re.compile(
    rb'"(?:cache_control|(prompt_cache_options))"\s{0,9}:\s{0,9}\{([^{}]{0,500})\}'
    rb'|"prompt_cache_retention"\s{0,9}:\s{0,9}"24h"'
)
"""A quote in a JSON string has a backslash before it, so no text of a prompt matches."""
_TTL = re.compile(rb'"ttl"\s{0,9}:\s{0,9}"([0-9]{1,2})([mh])"')
_EXPLICIT = re.compile(rb'"mode"\s{0,9}:\s{0,9}"explicit"')
_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000


_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]


class _Action(msgspec.Struct):
    """Action of vLLM 0.33 v1/kv_hints/protocol.py `KvHintAction`; all but its type may be left out."""

    action_type: _Name
    action_id: _Name = ""
    action_version: str = ""
    payload: dict[str, Any] = {}


class _Envelope(msgspec.Struct):
    """Envelope of actions (vLLM 0.33 v1/kv_hints/protocol.py `KvHintsEnvelope`)."""

    actions: list[_Action]
    protocol_version: str = ""
    message_id: str = ""


class _Retain(msgspec.Struct):
    """Payload of `retain` and `pin`."""

    ttl: int | float
    tier: Literal["disk", "host"] = "host"


@dataclass(frozen=True, slots=True)
class Hint:
    """One action that a client asks for."""

    action_id: str
    action_type: str
    ttl_s: int = 0
    """Minimum lifetime in seconds; 0: it asks for no promise."""
    pinned: bool = False

    @property
    def placement(self) -> str:
        """Name of the placement that it asks for; empty: it asks for none."""
        kind = self.action_type.lower()
        return kind if kind in PLACEMENTS else ""


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints and marks of one request."""

    asked: tuple[Hint, ...] = ()
    marked_ms: int = 0
    """Longest lifetime of the marks; 0: there are none."""

    @property
    def pinned(self) -> bool:
        """Whether a hint asks for memory."""
        return any(hint.pinned for hint in self.asked)

    @property
    def placements(self) -> tuple[str, ...]:
        """Placements that the hints ask for, in their order."""
        return tuple([hint.placement for hint in self.asked if hint.placement])

    def retain_ms(self, life_ms: int = RETAIN_MS_MAX) -> int:
        """Return the lifetime to ask the sidecar for: that of the KV at most, and a day at most."""
        longest_ms = max([self.marked_ms, *(hint.ttl_s * 1000 for hint in self.asked)])
        return max(min(longest_ms, life_ms, RETAIN_MS_MAX), 0)

    def answers(self, saved: SaveOutcome, *, retain_ms: int, expires_at_ms: int) -> list[dict[str, Any]]:
        """Return the answer to each hint: accepted, clipped or denied.

        `retain_ms`: the lifetime that the sidecar was asked for. `expires_at_ms`: the KV's expiry.
        """
        promise, placed, answers = saved.promise, iter(saved.placements), []
        until_ms = min(promise.until_ms, expires_at_ms)
        for hint in self.asked:
            answer: dict[str, Any] = {"action_id": hint.action_id, "action_type": hint.action_type}
            if hint.placement:
                it = next(placed, Placement())
                told = {"outcome": it.outcome, "bytes": it.size_bytes, "tier": it.tier, "reason": it.reason}
                answers.append(answer | {name: value for name, value in told.items() if value})
            elif not hint.ttl_s:
                answers.append(answer | {"outcome": "denied", "reason": "unsupported"})
            elif not promise.until_ms:
                answers.append(answer | {"outcome": "denied", "reason": promise.reason or "not_saved"})
            else:
                is_short = bool(promise.reason) or round(retain_ms / 1000) < hint.ttl_s
                outcome = "clipped" if is_short or hint.pinned > promise.pinned else "accepted"
                tier = "host" if promise.pinned else "disk"
                answers.append(answer | {"outcome": outcome, "until": until_ms // 1000, "tier": tier})
        return answers


NO_HINTS = Hints()


def read_hints(value: Any) -> tuple[Hint, ...]:
    """Return the actions of a `kv_hints` field; None has none. Raises InvalidRequest."""
    if value is None:
        return ()
    try:
        actions = msgspec.convert(value, _Envelope).actions
        if len(actions) > ACTIONS_MAX:
            raise InvalidRequest(f"kv_hints must have at most {ACTIONS_MAX} actions", param="kv_hints")
        return tuple([_hint(action, str(number)) for number, action in enumerate(actions)])
    except ValueError as exc:
        raise InvalidRequest(f"kv_hints: {str(exc)[:_FAULT_CHARS_MAX]}", param="kv_hints") from exc


def _hint(action: _Action, number: str) -> Hint:
    """Return an action as a hint. Raises ValueError."""
    name, kind = action.action_id or number, action.action_type
    if kind.lower() not in {"retain", "pin"}:
        return Hint(name, kind)
    payload = msgspec.convert(action.payload, _Retain)
    ttl_s = whole(payload.ttl)
    if ttl_s is None or not 1 <= ttl_s <= 2**53:
        raise ValueError("payload.ttl must be a whole number of seconds from 1")
    return Hint(name, kind, ttl_s, pinned=kind.lower() == "pin" and payload.tier == "host")


def marked_ms(raw: bytes) -> int:
    """Return the longest lifetime that the cache marks in a JSON body ask for, in ms; 0: it has none.

    `cache_control`: 5 minutes unless it says more. `prompt_cache_options`: 30 minutes unless it says more; none in
    mode `explicit` without a breakpoint. `prompt_cache_retention: 24h`: a day.
    """
    marks = list(_marks(raw))
    explicit = [found for found in marks if found[1] and _EXPLICIT.search(found[2])]
    if explicit and b'"prompt_cache_breakpoint"' not in raw:
        marks = [found for found in marks if found not in explicit]
    return max(map(_mark_ms, marks), default=0)


def _marks(raw: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the marks. To search 32 MiB for the names takes 30 ms, and for the pattern half a second."""
    for name in _NAMES:
        place = -1
        for _ in range(_MARKS_MAX):
            if (place := raw.find(name, place + 1)) < 0:
                break
            if found := _MARK.match(raw, place):
                yield found


def _mark_ms(found: re.Match[bytes]) -> int:
    is_options, fields = found[1], found[2]
    if fields is None:
        return _DAY_MS
    ttl = _TTL.search(fields)
    if ttl is None:
        return 30 * _MINUTE_MS if is_options else 5 * _MINUTE_MS
    return min(int(ttl[1]) * (_MINUTE_MS if ttl[2] == b"m" else _HOUR_MS), RETAIN_MS_MAX)
