"""Is a prompt the next piece of a conversation, or the conversation again? Pure.

T is the transcript, X the request's prompt (design section 4, seed 000). Messages are read by their signs of history
(`history.py`). Text and token ids are a resend when they start with T or with T's first prompt, when they share at
least four fifths of T from its start, or when they begin with a long end of T (a window). This module says
which part of T stays. Composition makes the engine's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from contextcache.errors import InvalidRequest
from contextcache.model import ContextMode, SegmentKind
from vllm_plugin.turn.prompt.history import Divergence, Sent, Why, check_append, divergence, find_new
from vllm_plugin.turn.prompt.meaning import meanings, rendering
from vllm_plugin.turn.prompt.request import ClientPrompt
from vllm_plugin.turn.prompt.transcript import Transcript, common_prefix, whole_segments

_REPLAY_SHARE = 0.8
"""Share of the transcript that a prompt must repeat from its start to count as a replay."""
_WINDOW_CHARACTERS_MIN = 64
_WINDOW_TOKENS_MIN = 16
"""An end of T that is shorter, or shorter than its last answer, may be a quote."""
_WINDOW_TRIES_MAX = 16
"""Places where T's end may stand in a prompt that consists of it."""


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
class PromptMatch:
    """Part of T that stays before the new part."""

    outcome: Outcome
    keep_segments: int
    """Leading segments of T with which X begins; all of them for an append."""
    diverged: Divergence | None = None
    """Where and why a resend leaves T; set for DIVERGE."""
    new: tuple[int, ...] | None = None
    """Positions of the messages of X that an append adds; None: all of X."""


def match(
    transcript: Transcript, prompt: ClientPrompt, *, mode: ContextMode, has_stored_ids: bool = False
) -> PromptMatch:
    """Compare a prompt with a transcript of at least one segment.

    `has_stored_ids`: at least one message of X has the id of an item that T delivered.
    Raises InvalidRequest for an empty transcript, HistoryAmbiguous for messages that could be either.
    """
    if not transcript.segments:
        raise InvalidRequest("the context is empty")
    if prompt.messages is not None:
        found = _match_messages(transcript, prompt.messages, mode, has_stored_ids=has_stored_ids)
    elif mode is ContextMode.APPEND:
        found = None
    elif prompt.token_ids is not None:
        lengths = [len(segment.token_ids) for segment in transcript.segments]
        found = _match_plain(_Plain(prompt.token_ids, transcript.token_ids, lengths), transcript, mode)
    elif transcript.has_chat:
        found = PromptMatch(Outcome.DIVERGE, 0, Divergence(None, Why.OTHER)) if mode is ContextMode.REPLAY else None
    else:
        lengths = [len(segment.text) for segment in transcript.segments]
        found = _match_plain(_Plain(prompt.text or "", transcript.text, lengths), transcript, mode)
    return found or PromptMatch(Outcome.APPEND, len(transcript.segments))


def _match_messages(
    transcript: Transcript, messages: Sequence[dict[str, Any]], mode: ContextMode, *, has_stored_ids: bool
) -> PromptMatch | None:
    sent = meanings(messages)
    if mode is ContextMode.APPEND:
        check_append(sent)
        return None
    stored = transcript.meanings
    if mode is ContextMode.AUTO:
        new = find_new(stored, Sent(sent, has_stored_ids=has_stored_ids), is_chat=transcript.is_chat)
        if new is not None:
            return PromptMatch(Outcome.APPEND, len(transcript.segments), new=new)
    kept = position = 0
    for segment, said in zip(transcript.segments, transcript.messages_by_segment, strict=True):
        end = position + len(said)
        if not segment.messages_json or sent[position:end] != stored[position:end]:
            break
        # An answer's ids are the model's own, however the template would show it.
        num_alike = len(said)
        if segment.kind is SegmentKind.PROMPT:
            num_alike = _count_shown_alike(said, messages[position:end])
        if num_alike < len(said):
            return PromptMatch(Outcome.DIVERGE, kept, Divergence(position + num_alike, Why.RESPELLED))
        kept, position = kept + 1, end
    if kept < len(transcript.segments):
        return PromptMatch(Outcome.DIVERGE, kept, divergence(stored, sent))
    return PromptMatch(Outcome.EXACT if position == len(sent) else Outcome.EXTEND, kept)


def _count_shown_alike(stored: Sequence[dict[str, Any]], sent: Sequence[dict[str, Any]]) -> int:
    """Return how many leading messages of those that mean the same also give the template the same."""
    pairs = zip(stored, sent, strict=True)
    alike = (ours == theirs or rendering(ours) == rendering(theirs) for ours, theirs in pairs)
    return next((at for at, is_alike in enumerate(alike) if not is_alike), len(stored))


@dataclass(frozen=True, slots=True)
class _Plain:
    """X and T in one form: both text, or both token ids."""

    given: str | tuple[int, ...]
    stored: str | tuple[int, ...]
    lengths: list[int]
    """Lengths of T's segments."""


def _match_plain(plain: _Plain, transcript: Transcript, mode: ContextMode) -> PromptMatch | None:
    given, stored, lengths = plain.given, plain.stored, plain.lengths
    shared = common_prefix(given, stored)
    shows_beginning = 0 < lengths[0] <= shared or 0 < _REPLAY_SHARE * len(stored) <= shared
    is_window = not shows_beginning and _is_window(plain, transcript)
    if mode is ContextMode.AUTO and not (shows_beginning or is_window):
        return None
    extends = shared == len(stored) < len(given)
    kept = whole_segments(lengths, shared)
    while kept and not lengths[kept - 1] and not extends:
        kept -= 1  # an answer without visible text: the prompt before it was sent again
    if kept == len(lengths):
        return PromptMatch(Outcome.EXTEND if extends else Outcome.EXACT, kept)
    if shared == len(given):
        why = Why.REGENERATED
    elif is_window:
        why = Why.WINDOW
    else:
        why = Why.EDITED if shows_beginning else Why.OTHER
    return PromptMatch(Outcome.DIVERGE, kept, Divergence(None, why))


def _is_window(plain: _Plain, transcript: Transcript) -> bool:
    answers = (
        length
        for segment, length in zip(reversed(transcript.segments), reversed(plain.lengths), strict=True)
        if segment.kind is SegmentKind.ANSWER
    )
    at_least = max(next(answers, 0), _WINDOW_CHARACTERS_MIN if isinstance(plain.given, str) else _WINDOW_TOKENS_MIN)
    if len(plain.given) < at_least:
        return False
    try:
        return begins_with_end_of(_as_text(plain.stored), _as_text(plain.given), at_least)
    except (ValueError, OverflowError):  # an id that no vocabulary has: the engine will say so
        return False


def begins_with_end_of(stored: str, given: str, at_least: int) -> bool:
    """Return whether `given` begins with an end of `stored` of so many characters or more.

    The longest possible ends are looked at first, and not more of them than `_WINDOW_TRIES_MAX`: linear work, whatever
    the texts are made of.
    """
    if min(len(stored), len(given)) < at_least:
        return False
    # Backwards, because CPython searches forwards in linear time and backwards in quadratic.
    backwards, end = given[::-1], stored[-at_least:][::-1]
    at = backwards.find(end, max(0, len(given) - len(stored)))
    for _ in range(_WINDOW_TRIES_MAX):
        if at < 0:
            break
        if stored.endswith(given[: len(given) - at]):
            return True
        at = backwards.find(end, at + 1)
    return False


def _as_text(given: str | tuple[int, ...]) -> str:
    """Return token ids as characters, so that C searches them. Raises ValueError for ids over 1 114 111."""
    return given if isinstance(given, str) else "".join(map(chr, given))
