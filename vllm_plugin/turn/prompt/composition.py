"""From a matched prompt to the token ids the engine gets, and the segments the transcript grows by.

Kept segments give their stored ids; only new text is tokenised. A chat turn is spliced on at token level after the
last kept answer: the template is rendered with short placeholders up to that answer's open end and again with the
messages that follow, and the difference (the answer's closing tokens, the messages, the generation prompt) comes after
the stored ids. Where a template does not allow that, the messages are rendered as a whole, and the segments whose
ids come out the same are kept. The messages of a resend go to the engine, and into the transcript, as they were sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from contextcache.errors import InvalidRequest
from contextcache.model import Segment, SegmentKind
from vllm_plugin.turn.answer.chat import AnswerResult
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.prompt.history import Divergence, Why
from vllm_plugin.turn.prompt.matching import Outcome, PromptMatch
from vllm_plugin.turn.prompt.request import CHAT_PATH, ClientPrompt, TurnRequest, messages_json
from vllm_plugin.turn.prompt.transcript import ITEM_IDS, Transcript, common_prefix, whole_segments
from vllm_plugin.turn.prompt.window import refuse_too_long

_PLACEHOLDER = "Yes."
_OTHER_PLACEHOLDER = "No."
HEAD_ROLES = ("system", "developer")
_MAX_CLOSING_TOKENS = 16
_MAX_TRIMMED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ComposedPrompt:
    """The prompt of one turn, ready for the engine."""

    token_ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    """The whole conversation for the chat route; empty for completions."""
    context_tokens: int
    """Leading ids that are the transcript's."""
    keep_segments: int
    segments: tuple[Segment, ...]
    """Segments of the client's part after the kept ones: none or one."""
    outcome: Outcome = Outcome.APPEND
    diverged: Divergence | None = None
    truncated_tokens: int = 0
    """That were cut, so that it fits."""


async def compose_first(engine: Engine, request: TurnRequest) -> ComposedPrompt:
    """Compose the first prompt of a new context. Raises ContextLengthExceeded for one that cannot fit."""
    await refuse_too_long(engine, request, request.prompt)
    ids = await _ids_of(engine, request, request.prompt, at_start=True)
    segment = await prompt_segment(engine, request, request.prompt, ids)
    return ComposedPrompt(ids, request.prompt.messages or (), 0, 0, (segment,))


async def compose_turn(
    engine: Engine, request: TurnRequest, transcript: Transcript, match: PromptMatch
) -> ComposedPrompt:
    """Compose the prompt of a later turn. Raises ContextLengthExceeded for new text that cannot fit."""
    head = transcript.head(match.keep_segments)
    outcome, diverged = match.outcome, match.diverged
    is_append = outcome is Outcome.APPEND
    messages: tuple[dict[str, Any], ...] = ()
    ids: tuple[int, ...]
    if request.prompt.messages is not None:
        await refuse_too_long(engine, request, request.prompt)
        messages = (transcript.messages if is_append else ()) + request.prompt.messages
        frame = None if is_append else await _frame(engine, request, head)
        if frame and not frame.opens(head.token_ids):
            head, outcome, diverged = Transcript(), Outcome.DIVERGE, Divergence(0, Why.HEAD_CHANGED)
        if len(head.segments) == 1 and len(head.messages) == len(messages) and frame and frame.ends(head.token_ids):
            rest, ids = None, ()  # another answer to the first prompt: the generation prompt is there
        else:
            head, rest, ids = await _chat_after(engine, request, head, messages)
    else:
        rest = request.prompt if is_append else _after(head, request.prompt)
        if rest is None:
            ids = ()
        else:
            await refuse_too_long(engine, request, rest)
            ids = await _ids_of(engine, request, rest, at_start=not head.segments)
    whole = head.token_ids + ids
    return ComposedPrompt(
        token_ids=whole,
        messages=messages,
        context_tokens=common_prefix(whole, transcript.token_ids),
        keep_segments=len(head.segments),
        segments=() if rest is None else (await prompt_segment(engine, request, rest, ids),),
        outcome=outcome,
        diverged=diverged,
    )


async def answer_segment(engine: Engine, request: TurnRequest, result: AnswerResult) -> Segment | None:
    """Return the answer as a segment whose ids are those of the text the client has seen; None for no answer.

    A completion's end-of-sequence token is not part of the text; a stop string cuts the text inside a token. A chat
    answer keeps its end-of-turn token, because the template puts one there.
    """
    ids = tuple(result.token_ids)
    chat = request.path == CHAT_PATH
    if result.finish_reason == "stop" and not request.engine_fields.get("include_stop_str_in_output"):
        if isinstance(result.stop_reason, str):
            ids = await _trim_to_text(engine, request.model, ids, result.text)
        elif not chat:
            ids = ids[:-1]
    if not ids:
        return None
    if chat:
        delivered = {ITEM_IDS: result.item_ids} if result.item_ids else {}
        return Segment(SegmentKind.ANSWER, ids, messages_json=messages_json((result.message() | delivered,)))
    return Segment(SegmentKind.ANSWER, ids, text=result.text)


async def _ids_of(engine: Engine, request: TurnRequest, prompt: ClientPrompt, *, at_start: bool) -> tuple[int, ...]:
    if prompt.messages is not None:
        ids = await engine.tokenize_chat(request.model, prompt.messages, request.template_fields)
        return ids if at_start else await _without_bos(engine, request.model, ids)
    if prompt.token_ids is not None:
        return prompt.token_ids if at_start else await _without_bos(engine, request.model, prompt.token_ids)
    special = bool(request.template_fields.get("add_special_tokens", True)) and at_start
    return await engine.tokenize(request.model, prompt.text or "", add_special_tokens=special)


async def _without_bos(engine: Engine, model: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Drop a beginning-of-sequence token that stands in the middle of a conversation."""
    begin = await engine.tokenize(model, "", add_special_tokens=True)
    return ids[1:] if begin and len(ids) > 1 and ids[0] == begin[0] else ids


async def prompt_segment(engine: Engine, request: TurnRequest, prompt: ClientPrompt, ids: tuple[int, ...]) -> Segment:
    """Return a client's prompt as a segment of these ids."""
    if prompt.messages is not None:
        return Segment(SegmentKind.PROMPT, ids, messages_json=messages_json(prompt.messages))
    text = prompt.text
    if text is None:
        # Kept so that a later replay in text can be matched.
        text = await engine.detokenize(request.model, ids)
    return Segment(SegmentKind.PROMPT, ids, text=text)


def _after(head: Transcript, prompt: ClientPrompt) -> ClientPrompt | None:
    """Return the part of a text or of ids after the head it begins with; None for nothing."""
    if prompt.token_ids is not None:
        rest = prompt.token_ids[len(head.token_ids) :]
        return ClientPrompt(token_ids=rest) if rest else None
    text = (prompt.text or "")[len(head.text) :]
    return ClientPrompt(text=text) if text else None


@dataclass(frozen=True, slots=True)
class _Frame:
    """Tokens that the template puts around a conversation's words now. Other tools or another date change them."""

    before: tuple[int, ...]
    """The first words."""
    after: tuple[int, ...]
    """The last words; empty when it is not known for the last message."""

    def opens(self, token_ids: tuple[int, ...]) -> bool:
        return token_ids[: len(self.before)] == self.before

    def ends(self, token_ids: tuple[int, ...]) -> bool:
        return bool(self.after) and token_ids[-len(self.after) :] == self.after


async def _frame(engine: Engine, request: TurnRequest, head: Transcript) -> _Frame | None:
    """Return the template's tokens around the messages of `head`; None: unknown."""
    opening = list(takewhile(lambda message: message["role"] in HEAD_ROLES, head.messages))
    first = head.messages[len(opening) : len(opening) + 1]
    if not first:
        return None
    try:
        one, other = await asyncio.gather(
            *(
                engine.tokenize_chat(
                    request.model, [*opening, {"role": first[0]["role"], "content": words}], request.template_fields
                )
                for words in (_PLACEHOLDER, _OTHER_PLACEHOLDER)
            )
        )
    except InvalidRequest:
        return None  # a template that refuses this refuses to be spliced, or the request
    # A token may span the words and the template next to them.
    num_before = max(0, common_prefix(one, other) - 1)
    num_after = max(0, common_prefix(one[::-1], other[::-1]) - 1)
    is_last = head.messages[-1]["role"] == first[0]["role"]
    return _Frame(one[:num_before], one[len(one) - num_after :] if is_last else ())


async def _chat_after(
    engine: Engine, request: TurnRequest, head: Transcript, messages: tuple[dict[str, Any], ...]
) -> tuple[Transcript, ClientPrompt | None, tuple[int, ...]]:
    """Return the segments of `head` that stay, the prompt after them, and its ids.

    `messages` is the whole conversation; it begins with the head's.
    """
    kinds = [segment.kind if segment.messages_json else None for segment in head.segments]
    while kinds and kinds[-1] is SegmentKind.PROMPT:
        kinds.pop()
    head = head.head(len(kinds))
    if kinds and kinds[-1] is SegmentKind.ANSWER:
        rest = messages[len(head.messages) :]
        if (ids := await _splice(engine, request, head, rest)) is not None:
            return head, ClientPrompt(messages=rest), ids
    # Keep text before the first chat segment: it has no messages to be rendered again.
    while kinds and kinds[-1] is not None:
        kinds.pop()
    base = head.head(len(kinds))
    rest = messages[len(base.messages) :]
    ids = await _ids_of(engine, request, ClientPrompt(messages=rest), at_start=not kinds)
    lengths = [len(segment.token_ids) for segment in head.segments[len(kinds) :]]
    same = whole_segments(lengths, common_prefix(ids, head.token_ids[len(base.token_ids) :]))
    if same and len(head.head(len(kinds) + same).messages) == len(messages):
        same -= 1  # nothing but another generation prompt would be left for a segment of its own
    kept = head.head(len(kinds) + same)
    return kept, ClientPrompt(messages=messages[len(kept.messages) :]), ids[sum(lengths[:same]) :]


async def _splice(
    engine: Engine, request: TurnRequest, head: Transcript, messages: tuple[dict[str, Any], ...]
) -> tuple[int, ...] | None:
    """Return the ids that follow `head`, whose last segment is an answer, when `messages` come next.

    None when the template does not allow it.
    """
    base = _placeholders(head.messages)
    try:
        open_end, full = await asyncio.gather(
            engine.tokenize_chat(request.model, base, request.template_fields, continue_final_message=True),
            engine.tokenize_chat(request.model, [*base, *messages], request.template_fields),
        )
    except InvalidRequest:
        return None
    if full[: len(open_end)] != open_end:
        return None
    following = full[len(open_end) :]
    return following[_overlap(head.segments[-1].token_ids, following) :]


def _placeholders(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shorten messages: the tokens after the last answer do not depend on earlier text."""
    short = [{**message, "content": _PLACEHOLDER} if message.get("content") else message for message in messages]
    short[-1] = {"role": messages[-1]["role"], "content": _PLACEHOLDER}
    return short


def _overlap(stored: tuple[int, ...], following: tuple[int, ...]) -> int:
    """Return how many closing tokens the model has already sampled itself (its end-of-turn token)."""
    for length in range(min(len(stored), len(following), _MAX_CLOSING_TOKENS), 0, -1):
        if stored[-length:] == following[:length]:
            return length
    return 0


async def _trim_to_text(engine: Engine, model: str, ids: tuple[int, ...], text: str) -> tuple[int, ...]:
    """Return ids for exactly `text`: whole tokens of it kept, the rest of a cut token tokenised again."""
    for dropped in range(min(len(ids), _MAX_TRIMMED_TOKENS) + 1):
        kept = ids[: len(ids) - dropped]
        prefix = await engine.detokenize(model, kept) if kept else ""
        if text.startswith(prefix):
            rest = text[len(prefix) :]
            return kept + (await engine.tokenize(model, rest, add_special_tokens=False) if rest else ())
    return ids
