"""The rest of an answer that an engine broke off: its request, and its chunks as chunks of the first part. Pure.

Rules: every sampled token that the client may know stays, so no token is sampled twice. The text of the known tokens
must begin with the text the client has seen, or the answer ends. The engine's detokeniser must not begin inside a
character: it would repeat the prompt (tokenizers 0.23 `DecodeStream` with ids that end so).

A stop string may lie across the break, where the next engine cannot see its beginning. So we find stop strings in the
rest ourselves, as vLLM 0.32 v1/engine/detokenizer.py `check_stop_strings` does, and the engine holds no text back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_plugin.turn.answer.chat import AnswerResult
from vllm_plugin.turn.prompt.request import CHAT_PATH, TurnRequest

REPLACED = "\ufffd"
"""Decoded text ends with it where the last character lacks bytes."""
_STATES: Mapping[str, str] = {
    "presence_penalty": "penalty",
    "frequency_penalty": "penalty",
    "bad_words": "bad_words",
    "structured_outputs": "grammar",
    "response_format": "grammar",
    "thinking_token_budget": "output_count",
    "repetition_detection": "output_count",
    "vllm_xargs": "logits_processor",
}
"""Fields by which vLLM 0.32 keeps a state over the sampled tokens, with the reason that names it. The state would begin
anew. `repetition_penalty` counts the prompt's tokens too, so it stays right."""
_COMPLETION_MAX_TOKENS = 16
"""vLLM's default for completions; a chat has none."""


class CannotResume(Exception):
    """The answer has a state that no other engine can take over; the reason is a word of a closed set."""


def check_state(request: TurnRequest, result: AnswerResult) -> None:
    """Raise CannotResume for an answer with delivered parts that has a state of its engine."""
    fields = request.engine_fields
    for name, reason in _STATES.items():
        if fields.get(name) and not (name == "response_format" and fields[name] == {"type": "text"}):
            raise CannotResume(reason)
    if fields.get("seed") is not None and fields.get("temperature") != 0:
        raise CannotResume("seed")
    if fields.get("tools") and fields.get("tool_choice") not in (None, "auto", "none"):
        raise CannotResume("grammar")
    if result.tool_calls:
        raise CannotResume("tool_call")
    if result.has_reasoning:
        raise CannotResume("reasoning")


def tells_tokens(request: TurnRequest) -> bool:
    """Return whether the client sees each token, also one without text."""
    return request.wants_token_ids or request.engine_fields.get("logprobs") not in (None, False)


def rest_fields(request: TurnRequest, num_known: int) -> dict[str, Any]:
    """Return the fields that differ in the request for the rest. Raises CannotResume."""
    fields, changed = request.engine_fields, dict[str, Any]()
    if not num_known:
        return changed
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if fields.get(name) is not None:
            changed[name] = fields[name] - num_known
    if request.path != CHAT_PATH and fields.get("max_tokens") is None:
        changed["max_tokens"] = _COMPLETION_MAX_TOKENS - num_known
    changed["min_tokens"] = max(changed.get("min_tokens", 0), 0)
    if any(count < 1 for name, count in changed.items() if name != "min_tokens"):
        raise CannotResume("max_tokens")
    if stop_strings(request):
        if changed["min_tokens"]:
            raise CannotResume("min_tokens")  # how many tokens a stop string across the break ends after is unknown
        changed["include_stop_str_in_output"] = True
    return changed


def stop_strings(request: TurnRequest) -> list[str]:
    """Return the request's stop strings."""
    stop = request.engine_fields.get("stop") or []
    return [stop] if isinstance(stop, str) else [one for one in stop if one]


def held_chars(request: TurnRequest) -> int:
    """Return the characters that an engine holds back at the end of a text, because a stop string may begin there."""
    if request.engine_fields.get("include_stop_str_in_output"):
        return 0
    return max(map(len, stop_strings(request)), default=1) - 1


@dataclass(frozen=True, slots=True)
class Known:
    """Part of an answer that the client has at a break."""

    head: Mapping[str, Any]
    """`id`, `object`, `created` and `model` of its chunks."""
    num_prompt_tokens: int
    token_ids: Sequence[int] = ()
    """Every sampled token."""
    text: str = ""
    """Text of these tokens."""
    num_seen_chars: int = 0
    """Leading characters of `text` that the client has."""
    text_offset: int = 0
    """Offset of the next token in the log-probabilities of a completion."""
    cached_tokens: int | None = None
    """Prompt tokens that the first engine did not compute; None: the next engine begins anew, and counts them."""


def usage_event(known: Known, num_tokens: int) -> dict[str, Any]:
    """Return the usage event of a stream. `num_tokens`: number of sampled tokens."""
    usage = {"prompt_tokens_details": {"cached_tokens": known.cached_tokens or 0}}
    return {**known.head, "choices": [], "usage": _summed(usage, known, num_tokens)}


def _summed(usage: dict[str, Any], known: Known, num_tokens: int) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": known.num_prompt_tokens, "completion_tokens": num_tokens}
    if known.cached_tokens is not None and (details := usage.get("prompt_tokens_details")):
        counts["prompt_tokens_details"] = {**details, "cached_tokens": known.cached_tokens}
    return {**usage, **counts, "total_tokens": known.num_prompt_tokens + num_tokens}


class Rest:
    """Writes the events of a later part as events of the first."""

    def __init__(self, request: TurnRequest, known: Known) -> None:
        self._known = known
        self._key = "content" if request.path == CHAT_PATH else "text"
        self._stops = stop_strings(request) if known.token_ids else []
        self._keeps_stop = bool(request.engine_fields.get("include_stop_str_in_output"))
        longest = max(map(len, self._stops), default=1) - 1
        self._num_held = held_chars(request)
        begin = max(0, min(known.num_seen_chars, len(known.text) - longest))
        self._text = known.text[begin:]
        """Text in which a stop string may begin, and all that the client has not seen."""
        self._num_sent = known.num_seen_chars - begin
        """Leading characters of `_text` that the client has."""
        self._longest = longest
        self._num_tokens = len(known.token_ids)
        self.ended = False
        """A stop string ended the answer; the engine does not know."""

    def take(self, told: dict[str, Any]) -> bool:
        """Rewrite an event; return whether it has a part of the answer.

        Raises CannotResume, and the errors in `chat.UNREADABLE`.
        """
        told |= self._known.head
        choices = told.get("choices") or []
        if choices and not self._take_choice(told, choices[0]):
            return False
        if usage := told.get("usage"):
            told["usage"] = _summed(usage, self._known, self._num_tokens)
        return True

    def usage_event(self) -> dict[str, Any]:
        """Return the usage event of an answer that a stop string ended."""
        return usage_event(self._known, self._num_tokens)

    def _take_choice(self, told: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Rewrite the event's choice; return whether the event has a part of the answer."""
        told.pop("prompt_token_ids", None)
        choice.pop("prompt_token_ids", None)
        told_by = choice.get("delta", choice)
        if self._key == "content" and "token_ids" not in choice:
            return False  # names the role again
        self._num_tokens += len(choice.get("token_ids") or ())
        if self._known.token_ids and told_by.get("reasoning"):
            raise CannotResume("reasoning")  # the first part had none
        if offsets := (choice.get("logprobs") or {}).get("text_offset"):
            choice["logprobs"]["text_offset"] = [self._known.text_offset + offset for offset in offsets]
        if self._stops:
            told_by[self._key] = self._passing(choice, told_by.get(self._key) or "")
        return True

    def _passing(self, choice: dict[str, Any], piece: str) -> str:
        """Return the text that may pass now; end the choice at a stop string."""
        self._text += piece
        end = max(0, len(self._text) - self._num_held)
        if found := self._first_stop(len(piece)):
            stop, start = found
            end = start + len(stop) if self._keeps_stop else start
            self.ended = choice.get("finish_reason") is None
            choice |= {"finish_reason": "stop", "stop_reason": stop}
        elif choice.get("finish_reason") is not None:
            end = len(self._text)
        passing = self._text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        cut = max(0, min(self._num_sent, len(self._text) - self._longest))
        self._text, self._num_sent = self._text[cut:], self._num_sent - cut
        return passing

    def _first_stop(self, num_new: int) -> tuple[str, int] | None:
        """Return the stop string that ends first in the text, of those that end in its last `num_new` characters."""
        found = []
        for stop in self._stops:
            start = self._text.find(stop, max(0, len(self._text) - num_new - len(stop) + 1))
            if num_new and start >= 0:
                found.append((start + len(stop), stop, start))
        if not found:
            return None
        _, stop, start = min(found, key=lambda one: one[0])
        return stop, start
