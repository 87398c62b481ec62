"""From a matched prompt to the token ids the engine gets, and the segments the transcript grows by.

Kept segments give their stored ids; only what is new is tokenised. A chat turn is spliced on at token level: the
template is rendered with short placeholders up to the open end of the last answer and again with the new messages, and
the difference (the answer's closing tokens, the new messages, the generation prompt) is what follows the stored ids.
Where a template does not allow that, the whole conversation is rendered and the longest common prefix is reused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contextcache.errors import InvalidRequest
from contextcache.model import Segment, SegmentKind
from vllm_plugin.turn.answer import AnswerResult
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.matching import Match
from vllm_plugin.turn.request import CHAT_PATH, Prompt, TurnRequest, messages_json
from vllm_plugin.turn.transcript import Transcript, common_prefix

_PLACEHOLDER = "Yes."
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
    """What the client's part adds after the kept segments: none or one."""
    context_mode: str
    """`append` or `replay`."""


async def compose_first(engine: Engine, request: TurnRequest) -> ComposedPrompt:
    """Compose the first prompt of a new context."""
    ids = await _ids_of(engine, request, request.prompt, at_start=True)
    segment = await _prompt_segment(engine, request, request.prompt, ids)
    return ComposedPrompt(ids, request.prompt.messages or (), 0, 0, (segment,), "append")


async def compose_turn(engine: Engine, request: TurnRequest, transcript: Transcript, match: Match) -> ComposedPrompt:
    """Compose the prompt of a later turn."""
    head, rest = transcript.head(match.keep_segments), match.rest
    if rest is None and head.segments[-1].messages_json and head.segments[-1].kind is SegmentKind.ANSWER:
        rest = Prompt(messages=())  # a history that ends in an answer still needs the next generation prompt
    if rest is None:
        ids: tuple[int, ...] = ()
    elif rest.messages is not None and head.segments:
        spliced = await _splice(engine, request, head, rest.messages)
        if spliced is None:
            head, rest, ids = await _render_again(engine, request, head, rest.messages)
        else:
            ids = spliced
    else:
        ids = await _ids_of(engine, request, rest, at_start=not head.segments)
    whole = head.token_ids + ids
    segments = () if rest is None else (await _prompt_segment(engine, request, rest, ids),)
    return ComposedPrompt(
        token_ids=whole,
        messages=head.messages() + ((rest.messages or ()) if rest else ()) if request.path == CHAT_PATH else (),
        context_tokens=common_prefix(whole, transcript.token_ids),
        keep_segments=len(head.segments),
        segments=segments,
        context_mode=match.outcome.context_mode,
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
        return Segment(SegmentKind.ANSWER, ids, messages_json=messages_json((result.message(),)))
    return Segment(SegmentKind.ANSWER, ids, text=result.text)


async def _ids_of(engine: Engine, request: TurnRequest, prompt: Prompt, *, at_start: bool) -> tuple[int, ...]:
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


async def _prompt_segment(engine: Engine, request: TurnRequest, prompt: Prompt, ids: tuple[int, ...]) -> Segment:
    if prompt.messages is not None:
        return Segment(SegmentKind.PROMPT, ids, messages_json=messages_json(prompt.messages))
    text = prompt.text
    if text is None:
        # Kept so that a later replay in text can be matched.
        text = await engine.detokenize(request.model, ids)
    return Segment(SegmentKind.PROMPT, ids, text=text)


async def _splice(
    engine: Engine, request: TurnRequest, head: Transcript, messages: tuple[dict[str, Any], ...]
) -> tuple[int, ...] | None:
    """Return the ids that follow `head` when `messages` come next; None when the template does not allow it."""
    last = head.segments[-1]
    if not last.messages_json:
        return await _ids_of(engine, request, Prompt(messages=messages), at_start=False)
    if last.kind is not SegmentKind.ANSWER:
        return None
    base = _placeholders(head.messages())
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
    return following[_overlap(head.token_ids, following) :]


async def _render_again(
    engine: Engine, request: TurnRequest, head: Transcript, messages: tuple[dict[str, Any], ...]
) -> tuple[Transcript, Prompt, tuple[int, ...]]:
    """Render the whole conversation; keep the segments whose ids it repeats, or none."""
    whole = head.messages() + messages
    ids = await engine.tokenize_chat(request.model, whole, request.template_fields)
    stored = head.token_ids
    if ids[: len(stored)] == stored:
        return head, Prompt(messages=messages), ids[len(stored) :]
    return Transcript(), Prompt(messages=whole), ids


def _placeholders(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shorten plain messages: what follows the last answer does not depend on what was said before it."""
    short = [
        {"role": message["role"], "content": _PLACEHOLDER}
        if isinstance(message.get("content"), str) and set(message) <= {"role", "content"}
        else message
        for message in messages
    ]
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
