"""A transcript as segments of text or messages with their token ids. Pure.

Rule 1: the ids of the segments, put together, are exactly the ids that the engine saw. Rule 2: stored text is never
tokenised again; a new turn keeps whole segments and adds ids after them. Rule 3: a value of the whole conversation
is computed once a turn, at its first use.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from contextcache.items import ITEM_IDS, RESPONSE, messages_json, response_record, stored_ids, stored_messages
from contextcache.model import Segment
from vllm_plugin.turn.prompt.meaning import Meaning, meanings

SHOWN_WITH = "shown_with"
"""Key of a stored answer: a digest of the tools, and the reasoning effort, that the template got with its prompt."""


@dataclass(frozen=True)
class Transcript:
    """The stored segments of one session, oldest first."""

    segments: tuple[Segment, ...] = ()

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All ids in order."""
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @cached_property
    def text(self) -> str:
        """All completion text in order."""
        return "".join(segment.text for segment in self.segments)

    @cached_property
    def messages_by_segment(self) -> tuple[tuple[dict[str, Any], ...], ...]:
        """The chat messages of each segment; none for a completion segment."""
        return tuple(segment_messages(segment) for segment in self.segments)

    @cached_property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The chat messages of all segments in order."""
        return tuple(chain.from_iterable(self.messages_by_segment))

    @cached_property
    def meanings(self) -> tuple[Meaning, ...]:
        """Meaning of each message."""
        return meanings(self.messages)

    @cached_property
    def item_ids(self) -> frozenset[str]:
        """Ids of all items that have one stored."""
        kept = (kept for segment in self.segments for _, kept in _with_ids(segment))
        return frozenset(chain.from_iterable(one.get(ITEM_IDS, ()) for one in kept))

    @property
    def pending(self) -> tuple[dict[str, Any], ...]:
        """The last messages, which wait for the turn that tokenises them."""
        first = len(self.segments)
        while first and self.segments[first - 1].messages_json and not self.segments[first - 1].num_tokens:
            first -= 1
        return tuple(chain.from_iterable(self.messages_by_segment[first:]))

    def identified(self, messages: Sequence[dict[str, Any]], *, kept: int) -> tuple[dict[str, Any], ...]:
        """Return messages that replace those behind the first `kept` segments, with ids and records of equal ones."""
        known: dict[str, list[dict[str, Any]]] = {}
        for message, ours in chain.from_iterable(map(_with_ids, self.segments[kept:])):
            known.setdefault(messages_json((message,)), []).append(ours)
        if not known:
            return tuple(messages)
        found = (known.get(messages_json((message,))) for message in messages)
        return tuple(message | ours.pop(0) if ours else message for message, ours in zip(messages, found, strict=True))

    @property
    def is_chat(self) -> bool:
        """Whether every segment holds chat messages."""
        return bool(self.segments) and all(segment.messages_json for segment in self.segments)

    @property
    def has_chat(self) -> bool:
        """Whether any segment holds chat messages."""
        return any(segment.messages_json for segment in self.segments)

    def head(self, num_segments: int) -> Transcript:
        """Return the first `num_segments` segments."""
        if num_segments == len(self.segments):
            return self
        head = Transcript(self.segments[:num_segments])
        if "messages_by_segment" in self.__dict__:  # read already
            head.__dict__["messages_by_segment"] = self.messages_by_segment[:num_segments]
        return head


def segment_messages(segment: Segment) -> tuple[dict[str, Any], ...]:
    """Return the chat messages of a segment; none for a completion segment."""
    messages = tuple(json.loads(segment.messages_json)) if segment.messages_json else ()
    for message in messages:
        for key in (ITEM_IDS, RESPONSE, SHOWN_WITH):
            message.pop(key, None)
    return messages


def shown_with(transcript: Transcript) -> Mapping[str, str]:
    """Return the settings that the template got with the prompt of the last answer; empty: none, or unknown."""
    last = transcript.segments[-1] if transcript.segments else None
    if last is None or SHOWN_WITH not in last.messages_json:
        return {}
    found: Mapping[str, str] = json.loads(last.messages_json)[-1].get(SHOWN_WITH, {})
    return found


def _with_ids(segment: Segment) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the messages of a segment that have stored ids of items or the record of a response, with these."""
    if ITEM_IDS in segment.messages_json or RESPONSE in segment.messages_json:
        for message, stored in zip(segment_messages(segment), stored_messages(segment), strict=True):
            ours = {ITEM_IDS: stored_ids(stored), RESPONSE: response_record(stored)}
            if any(ours.values()):
                yield message, {name: value for name, value in ours.items() if value}


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many leading items (or characters) are equal."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    # Halving compares slices at C speed: a 100 000-token history costs a dozen comparisons, not a Python loop.
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def whole_segments(lengths: Sequence[int], shared: int) -> int:
    """Return how many leading segments of such lengths lie entirely within the first `shared` items."""
    return bisect_right(list(accumulate(lengths)), shared)
