"""Cuts a conversation that no longer fits: its oldest turns, never its head and never new text (ADR 0056).

Only appended turns are cut: a client that sends the conversation again chooses its content. Cut messages are composed
as if the client had sent them so; of text and token ids the kept ids stay as they are. Either way the transcript
becomes the prompt that the engine saw.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

from contextcache.errors import ContextLengthExceeded, InvalidRequest
from contextcache.terms import whole
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.prompt.composition import HEAD_ROLES, ComposedPrompt, prompt_segment
from vllm_plugin.turn.prompt.matching import Outcome
from vllm_plugin.turn.prompt.request import ClientPrompt, TruncationType, TurnRequest
from vllm_plugin.turn.prompt.transcript import Transcript, common_prefix

_ANSWER_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Each route's name for the maximum tokens of its answer."""


async def cut_to_fit(
    engine: Engine, request: TurnRequest, transcript: Transcript, prompt: ComposedPrompt
) -> ComposedPrompt:
    """Return a turn's prompt, without the oldest of the context where the request wants it cut.

    Raises InvalidRequest, ContextLengthExceeded when head and new text alone do not fit.
    """
    said = request.truncation
    if said is None or prompt.outcome is not Outcome.APPEND:
        return prompt
    limit = await engine.window(request.model) - _answer_tokens(request)
    fits = len(prompt.token_ids) <= limit
    if fits and (said.type is TruncationType.ROLLING or len(transcript.token_ids) <= said.tokens):
        return prompt
    is_chat = request.prompt.messages is not None
    if transcript.has_chat != is_chat or transcript.is_chat != is_chat:
        raise InvalidRequest("a context of both text and messages cannot be cut", param="truncation")
    cut = await (_cut_messages if is_chat else _cut_ids)(engine, request, transcript, prompt, limit=limit)
    if cut is None:
        return prompt
    ids, rest = cut
    return replace(
        prompt,
        token_ids=ids,
        messages=rest.messages or (),
        context_tokens=common_prefix(ids, transcript.token_ids),
        keep_segments=0,
        segments=(await prompt_segment(engine, request, rest, ids),),
        truncated_tokens=max(0, len(prompt.token_ids) - len(ids)),
    )


def _answer_tokens(request: TurnRequest) -> int:
    """Return how many tokens the client wants for the answer; at least one."""
    fields = request.engine_fields
    return max(1, next(filter(None, (whole(fields.get(name)) for name in _ANSWER_TOKENS)), 1))


async def _cut_messages(
    engine: Engine, request: TurnRequest, transcript: Transcript, prompt: ComposedPrompt, *, limit: int
) -> tuple[tuple[int, ...], ClientPrompt] | None:
    """Return the ids and messages that stay; None: all of them. The kept part begins with a user's message."""
    said, new = request.truncation, request.prompt.messages
    assert said is not None
    assert new is not None
    head = tuple(takewhile(lambda message: message["role"] in HEAD_ROLES, transcript.messages))
    history = transcript.messages[len(head) :]
    starts = [index for index, message in enumerate(history) if message["role"] == "user"]
    if new[0]["role"] != "tool":  # results stay with the calls they are of
        starts.append(len(history))

    def kept_from(start: int) -> tuple[dict[str, Any], ...]:
        return head + history[start:] + new

    async def ids_from(start: int) -> tuple[int, ...]:
        return await engine.tokenize_chat(request.model, kept_from(start), request.template_fields)

    first, last = 0, len(starts) - 1
    ids = await ids_from(starts[last]) if starts else prompt.token_ids
    _check(len(ids), limit)
    is_rolling = said.type is TruncationType.ROLLING
    most = min(limit, len(prompt.token_ids) - said.tokens if is_rolling else len(ids) + said.tokens)
    if len(prompt.token_ids) <= most:
        return None
    while first < last:
        middle = (first + last) // 2
        found = await ids_from(starts[middle])
        if len(found) <= most:
            last, ids = middle, found
        else:
            first = middle + 1
    return ids, ClientPrompt(messages=kept_from(starts[last]))


async def _cut_ids(
    engine: Engine, request: TurnRequest, transcript: Transcript, prompt: ComposedPrompt, *, limit: int
) -> tuple[tuple[int, ...], ClientPrompt] | None:
    """Return the ids that stay; None: all of them. The token that begins every sequence of the model is the head."""
    said, stored = request.truncation, transcript.token_ids
    assert said is not None
    begin = await engine.tokenize(request.model, "", add_special_tokens=True)
    num_head = int(bool(begin) and stored[:1] == begin[:1])
    num_history, new = len(stored) - num_head, prompt.token_ids[len(stored) :]
    _check(num_head + len(new), limit)
    wanted = num_history - said.tokens if said.type is TruncationType.ROLLING else said.tokens
    num_kept = max(0, min(wanted, limit - num_head - len(new)))
    if num_kept >= num_history:
        return None
    ids = stored[:num_head] + stored[len(stored) - num_kept :] + new
    return ids, ClientPrompt(token_ids=ids)


def _check(num_tokens: int, limit: int) -> None:
    if num_tokens > limit:
        told = f"the part that cannot be cut has {num_tokens} tokens; besides the answer the model's window has {limit}"
        raise ContextLengthExceeded(told)
