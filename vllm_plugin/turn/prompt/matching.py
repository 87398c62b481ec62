"""Is a prompt the next piece of a conversation, or the conversation again? Pure.

T is the transcript, X the request's prompt (design section 4, seed 000). Text and token ids are a resend when they
start with T or with T's first prompt, when they share at least four fifths of T from its start, or when they begin with
a long end of T (a window). This module says which part of T stays. Composition makes the engine's prompt.

Messages are read by their signs of history. Clients resend a changed conversation: they trim, compact,
insert, edit. A resend taken for new messages would double the conversation, so any sign of history makes X a resend,
and messages that could be either are refused (docs/adr/0026). `is_resend` is the rule, line by line.

A client that names the answer it goes on from (`previous_response_id`, `conversation`) says that X follows T. Then X
is T again only if it begins as T does, or holds all of T. T's last messages at the beginning of X, and T's open tool
calls, are left out. Other messages of T are refused (docs/adr/0092).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from contextcache.errors import HistoryAmbiguous, InvalidRequest
from contextcache.items import Compacted
from contextcache.model import ContextMode, SegmentKind
from contextcache.responses import compaction_named, summary_digest
from vllm_plugin.turn.prompt.meaning import ASSISTANT, SYSTEM, Meaning, meanings, rendering
from vllm_plugin.turn.prompt.request import ClientPrompt, TurnRequest, with_new_messages
from vllm_plugin.turn.prompt.transcript import Transcript, common_prefix, whole_segments

_REPLAY_SHARE = 0.8
"""Share of the transcript that a prompt must repeat from its start to count as a replay."""
_WINDOW_CHARACTERS_MIN = 64
_WINDOW_TOKENS_MIN = 16
"""An end of T that is shorter, or shorter than its last answer, may be a quote."""
_WINDOW_TRIES_MAX = 16
"""Places where T's end may stand in a prompt that consists of it."""
_REPEATS_TRIED_MAX = 16
"""Places where the context's first or last message may stand among those sent. Bounds the work."""
_WHAT_TO_SET = 'context_mode "replay" if the messages are the whole conversation'


class Why(Enum):
    """Reason why a resend differs from the transcript."""

    REGENERATED = "regenerated"
    """It ends where the transcript goes on."""
    HEAD_CHANGED = "head_changed"
    """Another system prompt."""
    INSERTED = "inserted"
    TRIMMED = "trimmed"
    """Something is left out after the beginning."""
    WINDOW = "window"
    """It begins in the middle of the transcript."""
    EDITED = "edited"
    COMPACTED = "compacted"
    """Shorter, in other words."""
    RESPELLED = "respelled"
    """It means the same, and the template shows it otherwise."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Place where a resend leaves the transcript, and the reason."""

    message: int | None
    """Position in the messages sent; None for text and token ids."""
    why: Why


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
    """Compare a prompt with a transcript, which is empty for a conversation without items.

    `has_stored_ids`: at least one message of X has the id of an item that T delivered.
    Raises HistoryAmbiguous for messages that could be either.
    """
    if not transcript.segments:
        return PromptMatch(Outcome.APPEND, 0)
    if prompt.messages is not None:
        found = _match_messages(transcript, prompt.messages, mode, has_stored_ids=has_stored_ids)
    elif mode is ContextMode.APPEND:
        found = None
    elif prompt.token_ids is not None:
        found = _match_plain(transcript, prompt.token_ids, transcript.token_ids, mode)
    elif transcript.has_chat:
        found = PromptMatch(Outcome.DIVERGE, 0, Divergence(None, Why.OTHER)) if mode is ContextMode.REPLAY else None
    else:
        found = _match_plain(transcript, prompt.text or "", transcript.text, mode)
    return found or PromptMatch(Outcome.APPEND, len(transcript.segments))


def under_instructions(
    request: TurnRequest, history: Sequence[Mapping[str, Any]], mode: ContextMode, *, has_stored_ids: bool
) -> TurnRequest:
    """Return a request whose prompt has its instructions in the place of those that the history begins with.

    `history`: the messages of the transcript; none of a context that is being created. Instructions are no part of the
    input: a resend is recognised without them. Messages of the history that the input repeats are left out.
    Raises HistoryAmbiguous.
    """
    said, new = request.instructions, request.prompt.messages
    if said is None or new is None:
        return request
    system = ({"role": "system", "content": said},) if said else ()
    if not history:
        mode = ContextMode.APPEND if request.follows else mode
        return replace(request, prompt=ClientPrompt(messages=(*system, *new)), context_mode=mode)
    rest = tuple(map(dict, history[1 if history[0]["role"] == "system" else 0 :]))
    added: Sequence[int] | None = None if mode is ContextMode.REPLAY else range(len(new))
    if mode is ContextMode.AUTO:
        added = find_new(
            meanings(rest), meanings(new), is_chat=True, follows=request.follows, has_stored_ids=has_stored_ids
        )
    if added is None:
        whole = (*system, *new)
    elif [*system] == [*history[: len(history) - len(rest)]]:
        return replace(with_new_messages(request, added), context_mode=ContextMode.APPEND)
    else:
        whole = (*system, *rest, *(new[at] for at in added))
    return replace(request, prompt=replace(request.prompt, messages=whole), context_mode=ContextMode.REPLAY)


def with_summary(request: TurnRequest, transcript: Transcript) -> TurnRequest:
    """Put the summary that a compaction item names, a message of the transcript, in the place of the item.

    The messages then are the whole conversation: the context answers exactly them. Raises InvalidRequest if the
    transcript does not have the summary.
    """
    sent = request.prompt.messages or ()
    if not any(isinstance(message, Compacted) for message in sent):
        return request
    known = {summary_digest(message): message for message in transcript.messages}
    whole: list[dict[str, Any]] = []
    for message in sent:
        named = compaction_named(message["content"]) if isinstance(message, Compacted) else None
        if not isinstance(message, Compacted):
            whole.append(message)
        elif named is not None and named[1] in known:
            whole.append(known[named[1]])
        else:
            told = "the context does not have the summary of a compaction item: send the conversation without the item"
            raise InvalidRequest(told, param="messages")
    return replace(request, prompt=ClientPrompt(messages=tuple(whole)), context_mode=ContextMode.REPLAY)


def _match_messages(
    transcript: Transcript, messages: Sequence[dict[str, Any]], mode: ContextMode, *, has_stored_ids: bool
) -> PromptMatch | None:
    sent = meanings(messages)
    if mode is ContextMode.APPEND:
        check_append(sent)
        return None
    stored = transcript.meanings
    if mode is ContextMode.AUTO:
        new = find_new(stored, sent, is_chat=transcript.is_chat, has_stored_ids=has_stored_ids)
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


def _match_plain(
    transcript: Transcript, given: str | tuple[int, ...], stored: str | tuple[int, ...], mode: ContextMode
) -> PromptMatch | None:
    """Compare X with T, both as text or both as token ids."""
    lengths = [len(part.text if isinstance(given, str) else part.token_ids) for part in transcript.segments]
    shared = common_prefix(given, stored)
    shows_beginning = 0 < lengths[0] <= shared or 0 < _REPLAY_SHARE * len(stored) <= shared
    is_window = not shows_beginning and _is_window(transcript, lengths, given, stored)
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


def _is_window(
    transcript: Transcript, lengths: list[int], given: str | tuple[int, ...], stored: str | tuple[int, ...]
) -> bool:
    segments = zip(transcript.segments, lengths, strict=True)
    answers = [length for segment, length in segments if segment.kind is SegmentKind.ANSWER]
    at_least = max(*answers[-1:], 0, _WINDOW_CHARACTERS_MIN if isinstance(given, str) else _WINDOW_TOKENS_MIN)
    if len(given) < at_least:
        return False
    try:
        return begins_with_end_of(_as_text(stored), _as_text(given), at_least)
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


def find_new(
    stored: Sequence[Meaning],
    sent: Sequence[Meaning],
    *,
    is_chat: bool,
    follows: bool = False,
    has_stored_ids: bool = False,
) -> tuple[int, ...] | None:
    """Return the positions of the new messages in `sent`; None: `sent` is the conversation again.

    `is_chat`: the stored messages are all that the context holds. `follows`: the client named the answer that the
    messages follow. `has_stored_ids`: at least one has the id of an item that the context delivered.
    Raises HistoryAmbiguous.
    """
    known = _Stored(stored)
    if follows and not _head_length(sent):
        return _find_following(known, sent, has_stored_ids=has_stored_ids)
    if follows and not has_stored_ids and not any(map(known.has, sent)):
        raise _ambiguous("the messages have their own system message and nothing from the context")
    results = _find_results(known, sent)
    if results and not _answers_again(known.calls, [sent[at] for at in results]):
        return results
    if is_resend(stored, sent, is_chat=is_chat) or has_stored_ids:
        return None
    return tuple(range(len(sent)))


class _Stored:
    """The stored messages, asked whether others are theirs."""

    def __init__(self, stored: Sequence[Meaning]) -> None:
        self._messages = tuple(stored)
        self._body = tuple(message for message in stored if message.role != SYSTEM)
        self._last = stored[-1] if stored and stored[-1].role == ASSISTANT else None
        self.calls = _calls(stored)
        self._answers = {message.text for message in stored if message.role == ASSISTANT and message.text}

    def has(self, message: Meaning) -> bool:
        """Return whether a message is an answer, a tool call or an answered tool call of the context.

        User messages are no sign: users repeat themselves.
        """
        if message.role == ASSISTANT:
            return message.text in self._answers or any(call.id in self.calls for call in message.calls)
        return self.calls.get(message.answers) is False

    def begins(self, sent: Sequence[Meaning]) -> bool:
        """Return whether `sent` begins as the context does, or holds all of it: some insert a message before it."""
        starts = [at for at, message in enumerate(sent) if message == self._body[0]] if self._body else []
        ends = ((at, at + len(self._body)) for at in starts[:_REPEATS_TRIED_MAX])
        return starts[:1] == [0] or any(tuple(sent[start:end]) == self._body for start, end in ends)

    def is_last_answer(self, message: Meaning) -> bool:
        """Return whether a message is the last answer, or a part of it: its text or some of its calls."""
        last = self._last
        if last is None or message.role != ASSISTANT or not set(message.calls) <= set(last.calls):
            return False
        return message.text in ("", last.text)

    def count_repeated(self, sent: Sequence[Meaning]) -> int:
        """Return how many leading messages of `sent` are the context's last ones."""
        if self._last is None:
            return 0
        ends = [at + 1 for at, message in enumerate(sent) if message == self._last]
        for length in reversed(ends[-_REPEATS_TRIED_MAX:]):
            if tuple(sent[:length]) == self._messages[-length:]:
                return length
        return next((at for at, message in enumerate(sent) if not self.is_last_answer(message)), len(sent))


def _find_following(stored: _Stored, sent: Sequence[Meaning], *, has_stored_ids: bool) -> tuple[int, ...] | None:
    """Return the positions of the new messages after an answer that the client named; None: the conversation again.

    Raises HistoryAmbiguous.
    """
    if not has_stored_ids and not any(map(stored.has, sent)):
        return tuple(range(len(sent)))
    if stored.begins(sent):
        return None
    num_repeated = stored.count_repeated(sent)
    new = tuple(
        at
        for at, message in enumerate(sent)
        if at >= num_repeated and not (message.calls and stored.is_last_answer(message))
    )
    if not new or any(stored.has(sent[at]) or (has_stored_ids and sent[at].role == ASSISTANT) for at in new):
        raise HistoryAmbiguous(
            f"some of these messages are already in the context: send only the new ones, or set {_WHAT_TO_SET}",
            param="messages",
        )
    return new


def _find_results(stored: _Stored, sent: Sequence[Meaning]) -> tuple[int, ...]:
    """Return the positions of new messages when `sent` repeats the open tool calls before their results; else none.

    A trimmed conversation does not begin with a tool call without a question before it.
    """
    if not sent[0].calls or not stored.is_last_answer(sent[0]):
        return ()
    new = tuple(at for at, message in enumerate(sent) if not (message.calls and stored.is_last_answer(message)))
    has_results_only = all(sent[at].role not in (ASSISTANT, SYSTEM) for at in new)
    return new if has_results_only else ()


def is_resend(stored: Sequence[Meaning], sent: Sequence[Meaning], *, is_chat: bool) -> bool:
    """Return whether `sent` is the conversation again; False: only new messages. Raises HistoryAmbiguous.

    `is_chat`: the stored messages are all that the context holds. The first line that fits wins.
    """
    if is_chat and common_prefix(sent, stored) == len(stored):
        return True
    known, head = set(stored), _head_length(sent)
    body = sent[head:]
    if body and body[0] == next((message for message in stored if message.role != SYSTEM), None):
        return True
    if any(message.role == ASSISTANT for message in sent[:-1]) or (sent[-1].role == ASSISTANT and sent[-1] in known):
        return True
    calls = _calls(stored)
    repeats = any(message in known and not calls.get(message.answers) for message in body)
    if head:
        if not repeats:
            raise _ambiguous("the messages have their own system message and nothing from the context")
        return True
    if any(message.role == SYSTEM for message in sent):
        raise _ambiguous("the messages have a system message that is not the first")
    return _answers_again(calls, sent) or (repeats and len(sent) > 1)


def check_append(sent: Sequence[Meaning]) -> None:
    """Raise HistoryAmbiguous for new messages that begin like a conversation of their own."""
    if _head_length(sent):
        raise HistoryAmbiguous(
            f'new messages must not begin with a system message: leave it out, or set {_WHAT_TO_SET}, not "append"',
            param="context_mode",
        )


def divergence(stored: Sequence[Meaning], sent: Sequence[Meaning]) -> Divergence:
    """Return where `sent` leaves `stored`. The word is a reading of two lists, not a certainty."""
    at = common_prefix(sent, stored)
    return Divergence(at, _why(stored[at:], sent[at:], begins=at == 0, shorter=len(sent) < len(stored)))


def _why(stored: Sequence[Meaning], sent: Sequence[Meaning], *, begins: bool, shorter: bool) -> Why:
    """Return why two lists differ in their first messages. `begins`: nothing equal stands before them."""
    if not sent or not stored:
        return Why.OTHER if sent else Why.REGENERATED
    old, new = stored[0], sent[0]
    is_last = len(sent) == 1 or len(stored) == 1
    signs = (
        (Why.INSERTED, old in sent[1:]),
        (Why.WINDOW if begins else Why.TRIMMED, new in stored[1:]),
        (Why.HEAD_CHANGED, SYSTEM in (old.role, new.role)),
        (Why.EDITED, old.role == new.role and (is_last or sent[1] == stored[1])),
        (Why.COMPACTED, shorter),
    )
    return next((why for why, is_so in signs if is_so), Why.OTHER)


def _calls(stored: Sequence[Meaning]) -> dict[str, bool]:
    """Return which calls were made, and whether they are still open. Of a name that comes again the last counts."""
    calls: dict[str, bool] = {}
    for message in stored:
        calls.update((call.id, True) for call in message.calls if call.id)
        if message.answers:
            calls[message.answers] = False
    return calls


def _answers_again(calls: dict[str, bool], sent: Sequence[Meaning]) -> bool:
    """Return whether a result was given before. Raises HistoryAmbiguous for a result without a call."""
    results = {message.answers for message in sent if message.role == "tool"}
    if any(calls.get(result) is False for result in results):
        return True
    if results - calls.keys():
        raise _ambiguous("a tool message answers a call that the context does not have")
    return False


def _head_length(messages: Sequence[Meaning]) -> int:
    return next((at for at, message in enumerate(messages) if message.role != SYSTEM), len(messages))


def _ambiguous(what: str) -> HistoryAmbiguous:
    text = f"{what}: set {_WHAT_TO_SET}, or else send only the new messages without a system message"
    return HistoryAmbiguous(text, param="messages")
