"""A transcript as segments of text or messages with their token ids. Pure.

Rule 1: the ids of the segments, put together, are exactly what the engine saw. Rule 2: stored text is never
tokenised again; a new turn keeps whole segments and adds ids after them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contextcache.model import Segment


@dataclass(frozen=True, slots=True)
class Transcript:
    """The stored segments of one session, oldest first."""

    segments: tuple[Segment, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids in order."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def text(self) -> str:
        """All completion text in order."""
        return "".join(segment.text for segment in self.segments)

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
        return Transcript(self.segments[:num_segments])

    def messages(self) -> tuple[dict[str, Any], ...]:
        """Return the chat messages of all segments in order."""
        return tuple(message for segment in self.segments for message in segment_messages(segment))


def segment_messages(segment: Segment) -> tuple[dict[str, Any], ...]:
    """Return the chat messages of a segment; none for a completion segment."""
    return tuple(json.loads(segment.messages_json)) if segment.messages_json else ()


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


def whole_segments(transcript: Transcript, num_tokens: int) -> int:
    """Return how many leading segments lie entirely within the first `num_tokens` tokens."""
    kept = total = 0
    for segment in transcript.segments:
        total += len(segment.token_ids)
        if total > num_tokens:
            break
        kept += 1
    return kept
