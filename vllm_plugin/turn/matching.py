"""Is a prompt the next piece of a conversation, or its whole history again? Pure.

T is the transcript, P its first prompt, X the request's prompt (design section 4, seed 000). X that starts with T,
equals or starts with P, or shares at least `threshold` of T's characters is a REPLAY; anything else is an APPEND.
A replay keeps every whole segment that X repeats; what follows in X is new. Only counts and cuts are computed
here; tokenising what is new is the story's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from contextcache.errors import InvalidRequest
from vllm_plugin.turn.request import ContextMode, Prompt
from vllm_plugin.turn.transcript import Transcript, common_prefix, segment_messages, whole_segments


class Outcome(Enum):
    """How X stands to T (seed 000): `APPEND` is ours, for clients that send only the new turn."""

    APPEND = "append"
    EXACT = "exact"
    EXTEND = "extend"
    DIVERGE = "diverge"

    @property
    def context_mode(self) -> str:
        """The answer's `X-Context-Mode`."""
        return "append" if self is Outcome.APPEND else "replay"


@dataclass(frozen=True, slots=True)
class Match:
    """Which segments of T stay, and what of X comes after them."""

    outcome: Outcome
    keep_segments: int
    rest: Prompt | None
    """What follows the kept segments; None when nothing does (the kept segments are the prompt)."""


def match(transcript: Transcript, prompt: Prompt, *, mode: ContextMode, threshold: float) -> Match:
    """Compare a prompt with a transcript of at least one segment. Raises InvalidRequest for an empty transcript."""
    if not transcript.segments:
        raise InvalidRequest("the context is empty")
    if prompt.messages is not None:
        found = _match_messages(transcript, prompt.messages, threshold)
    elif prompt.token_ids is not None:
        found = _match_ids(transcript, prompt.token_ids, threshold)
    else:
        found = _match_text(transcript, prompt.text or "", threshold)
    if mode is ContextMode.APPEND or (mode is ContextMode.AUTO and found is None):
        return Match(Outcome.APPEND, len(transcript.segments), prompt)
    # A replay that shares nothing stands for itself.
    return found or Match(Outcome.DIVERGE, 0, prompt)


def _match_text(transcript: Transcript, text: str, threshold: float) -> Match | None:
    if transcript.has_chat:
        return None
    stored, first = transcript.text, transcript.segments[0].text
    shared = common_prefix(text, stored)
    if not ((first and text.startswith(first)) or (stored and shared / len(stored) >= threshold)):
        return None
    kept = length = 0
    for segment in transcript.segments:
        if length + len(segment.text) > shared:
            break
        length += len(segment.text)
        kept += 1
    rest = text[length:]
    return Match(_outcome(shared, len(stored), len(text)), kept, Prompt(text=rest) if rest else None)


def _match_ids(transcript: Transcript, token_ids: tuple[int, ...], threshold: float) -> Match | None:
    stored, first = transcript.token_ids, transcript.segments[0].token_ids
    shared = common_prefix(token_ids, stored)
    if not (shared >= len(first) or shared / len(stored) >= threshold):
        return None
    kept = whole_segments(transcript, shared)
    rest = token_ids[len(transcript.head(kept).token_ids) :]
    return Match(_outcome(shared, len(stored), len(token_ids)), kept, Prompt(token_ids=rest) if rest else None)


def _match_messages(transcript: Transcript, messages: tuple[dict[str, Any], ...], threshold: float) -> Match | None:
    if not transcript.is_chat:
        return None
    kept = position = 0
    for segment in transcript.segments:
        stored = segment_messages(segment)
        if tuple(map(_comparable, messages[position : position + len(stored)])) != tuple(map(_comparable, stored)):
            break
        position += len(stored)
        kept += 1
    if kept == 0 and _shared_share(transcript.messages(), messages) < threshold:
        return None
    rest = messages[position:]
    whole = kept == len(transcript.segments)
    outcome = (Outcome.EXTEND if rest else Outcome.EXACT) if whole else Outcome.DIVERGE
    return Match(outcome, kept, Prompt(messages=rest) if rest else None)


def _outcome(shared: int, stored: int, given: int) -> Outcome:
    if shared < stored:
        return Outcome.DIVERGE
    return Outcome.EXACT if given == stored else Outcome.EXTEND


def _shared_share(stored: tuple[dict[str, Any], ...], given: tuple[dict[str, Any], ...]) -> float:
    """Return the share of the stored messages' characters that the given ones repeat from the start."""
    shared = 0
    total = sum(len(_characters(message)) for message in stored)
    for left, right in zip(stored, given, strict=False):
        if _comparable(left) == _comparable(right):
            shared += len(_characters(left))
            continue
        if left.get("role") == right.get("role"):
            shared += common_prefix(_characters(left), _characters(right))
        break
    return shared / total if total else 0.0


def _characters(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return ""


def _comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Drop what clients add or leave out without meaning anything by it: absent, null and empty are the same."""
    return {key: value for key, value in message.items() if value not in (None, [], {}) and key != "refusal"}
