"""Are chat messages a conversation again, or only its new messages? Read from the signs of history in them. Pure.

T is the context, X the request. Clients resend a changed conversation: they trim, compact,
insert, edit. A resend taken for new messages would double the conversation, so any sign of history makes X a resend,
and messages that could be either are refused (docs/adr/0026). `is_resend` is the rule, line by line.

A client that names the answer it goes on from (`previous_response_id`, `conversation`) says that X follows T. Then X
is T again only if it begins as T does, or holds all of T. T's last messages at the beginning of X, and T's open tool
calls, are left out. Other messages of T are refused (docs/adr/0092).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from contextcache.errors import HistoryAmbiguous
from vllm_plugin.turn.prompt.meaning import ASSISTANT, SYSTEM, Meaning
from vllm_plugin.turn.prompt.transcript import common_prefix

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


@dataclass(frozen=True, slots=True)
class Sent:
    """The messages of a request, and the client's fields about them."""

    meanings: Sequence[Meaning]
    follows: bool = False
    """The client named the answer that they follow."""
    has_stored_ids: bool = False
    """At least one has the id of an item that the context delivered."""


def find_new(stored: Sequence[Meaning], sent: Sent, *, is_chat: bool) -> tuple[int, ...] | None:
    """Return the positions of the new messages in `sent`; None: `sent` is the conversation again.

    `is_chat`: the stored messages are all that the context holds. Raises HistoryAmbiguous.
    """
    told, known = sent.meanings, _Stored(stored)
    if sent.follows and not _head_length(told):
        return _find_following(known, sent)
    if sent.follows and not sent.has_stored_ids and not any(map(known.has, told)):
        raise _ambiguous("the messages have their own system message and nothing from the context")
    results = _find_results(known, told)
    if results and not _answers_again(known.calls, [told[at] for at in results]):
        return results
    if is_resend(stored, told, is_chat=is_chat) or sent.has_stored_ids:
        return None
    return tuple(range(len(told)))


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


def _find_following(stored: _Stored, sent: Sent) -> tuple[int, ...] | None:
    """Return the positions of the new messages after an answer that the client named; None: the conversation again.

    Raises HistoryAmbiguous.
    """
    told = sent.meanings
    if not sent.has_stored_ids and not any(map(stored.has, told)):
        return tuple(range(len(told)))
    if stored.begins(told):
        return None
    num_repeated = stored.count_repeated(told)
    new = tuple(
        at
        for at, message in enumerate(told)
        if at >= num_repeated and not (message.calls and stored.is_last_answer(message))
    )
    if not new or any(stored.has(told[at]) or (sent.has_stored_ids and told[at].role == ASSISTANT) for at in new):
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
