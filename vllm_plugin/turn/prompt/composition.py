"""From a matched prompt to the token ids the engine gets, and the segments the transcript grows by.

Kept segments give their stored ids; only new text is tokenised. A chat turn is spliced on at token level after the
last kept answer: the template is rendered with short placeholders up to that answer's open end and again with the
messages that follow, and the difference (the answer's closing tokens, the messages, the generation prompt) comes after
the stored ids. Where a template does not allow that, the messages are rendered as a whole, and the segments whose
ids come out the same are kept. The messages of a resend go to the engine, and into the transcript, as they were sent.

A prompt that cannot fit the model's window is refused before all of it is tokenised. Tokenising takes a second per
megabyte and holds up every other request of the pod. The beginning of a long prompt is enough to refuse it: a text that
begins with more tokens than the window has cannot fit, however it goes on. Only text without token ids is checked, the
client's new text and added items: `truncation` cuts stored history, never new text.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

from contextcache.errors import ContextCacheError, ContextLengthExceeded, InvalidRequest
from contextcache.items import INSTRUCTIONS, ITEM_IDS, RESPONSE, messages_json
from contextcache.model import Segment, SegmentKind
from contextcache.terms import whole
from vllm_plugin.turn.answer.chat import AnswerResult, compact_json
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.prompt.matching import Divergence, Outcome, PromptMatch, Why
from vllm_plugin.turn.prompt.request import (
    CHAT_PATH,
    ClientPrompt,
    Truncation,
    TruncationType,
    TurnRequest,
)
from vllm_plugin.turn.prompt.transcript import SHOWN_WITH, Transcript, common_prefix, whole_segments

_PLACEHOLDER = "Yes."
_OTHER_PLACEHOLDER = "No."
_HEAD_ROLES = ("system", "developer")
_MAX_CLOSING_TOKENS = 16
_MAX_TRIMMED_TOKENS = 64
_ANSWER_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Each route's name for the maximum tokens of its answer."""
SHORT_TOKENS = 1024
"""Longer lists of ids are compared with the window first."""
CHARS_PER_TOKEN = 16
"""Length of a piece, in characters per token of the window. Most text has four characters a token, so its first piece
is too long already. Runs of spaces have up to 128, and take several."""
SHORT_CHARS = CHARS_PER_TOKEN * SHORT_TOKENS
"""Longer texts are looked at: a shorter one is tokenised in milliseconds."""
CUT_TOKENS = 64
"""Tokens by which two pieces may have more than both together: a cut changes only the tokens next to it."""
_DIGEST_CHARS = 16
_SHOWN_ROLES = frozenset({"system", "user"})


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
    segment = await _prompt_segment(engine, request, request.prompt, ids, Transcript(), kept=0)
    return ComposedPrompt(ids, request.prompt.messages or (), 0, 0, (segment,))


async def compose_turn(
    engine: Engine, request: TurnRequest, transcript: Transcript, match: PromptMatch
) -> ComposedPrompt:
    """Compose the prompt of a later turn, without the oldest of the context where the request wants it cut.

    Raises InvalidRequest, ContextLengthExceeded when head and new text alone do not fit.
    """
    head = transcript.head(match.keep_segments)
    outcome, diverged = match.outcome, match.diverged
    is_append = outcome is Outcome.APPEND
    messages: tuple[dict[str, Any], ...] = ()
    ids: tuple[int, ...]
    if request.prompt.messages is not None:
        # Each by itself: the rest behind a deleted item may fill the window, and `truncation` cuts it.
        for new in (request.prompt.messages, transcript.pending if is_append else ()):
            await refuse_too_long(engine, request, ClientPrompt(messages=new))
        messages = (transcript.messages if is_append else ()) + request.prompt.messages
        frame = None if is_append else await _frame(engine, request, head)
        if frame and head.token_ids[: len(frame.before)] != frame.before:
            head, outcome, diverged = Transcript(), Outcome.DIVERGE, Divergence(0, Why.HEAD_CHANGED)
        is_first = len(head.segments) == 1 and len(head.messages) == len(messages)
        if is_first and frame and frame.after and head.token_ids[-len(frame.after) :] == frame.after:
            rest, ids = None, ()  # another answer to the first prompt: the generation prompt is there
        else:
            head, rest, ids = await _chat_after(engine, request, head, messages)
    else:
        if transcript.pending:
            raise InvalidRequest(
                "the context has items that no turn has read: continue it with messages", param="prompt"
            )
        rest = request.prompt if is_append else _after(head, request.prompt)
        if rest is None:
            ids = ()
        else:
            await refuse_too_long(engine, request, rest)
            ids = await _ids_of(engine, request, rest, at_start=not head.segments)
    whole_ids = head.token_ids + ids
    prompt = ComposedPrompt(
        token_ids=whole_ids,
        messages=messages,
        context_tokens=common_prefix(whole_ids, transcript.token_ids),
        keep_segments=len(head.segments),
        segments=()
        if rest is None
        else (await _prompt_segment(engine, request, rest, ids, transcript, kept=len(head.segments)),),
        outcome=outcome,
        diverged=diverged,
    )
    if request.truncation is None or outcome is not Outcome.APPEND:
        return prompt
    return await _cut_to_fit(engine, request, request.truncation, transcript, prompt)


async def answer_segment(engine: Engine, request: TurnRequest, result: AnswerResult) -> Segment | None:
    """Return the answer as a segment whose ids are those of the text the client has seen; None for no answer.

    A completion's end-of-sequence token is not part of the text; a stop string cuts the text inside a token. A chat
    answer keeps its end-of-turn token, because the template puts one there.
    """
    ids = tuple(result.token_ids)
    chat = request.path == CHAT_PATH
    if result.finish_reason == "stop":
        if isinstance(result.stop_reason, str):
            ids = await _trim_to_text(engine, request.model, ids, result.text)
        elif not chat and not request.engine_fields.get("include_stop_str_in_output"):
            ids = ids[:-1]
    if not ids:
        return None
    if chat:
        ours = {ITEM_IDS: result.item_ids, RESPONSE: result.response, SHOWN_WITH: settings_shown(request)}
        delivered = {name: value for name, value in ours.items() if value}
        return Segment(SegmentKind.ANSWER, ids, messages_json=messages_json((result.message() | delivered,)))
    return Segment(SegmentKind.ANSWER, ids, text=result.text)


def settings_shown(request: TurnRequest) -> dict[str, str]:
    """Return the settings that a template shows besides the messages: a digest of the tools, the reasoning effort."""
    fields = request.template_fields
    arguments = fields.get("chat_template_kwargs")
    effort = arguments.get("reasoning_effort") if isinstance(arguments, dict) else None
    tools = compact_json(fields["tools"]) if fields.get("tools") else b""
    shown = {"tools": tools and hashlib.sha256(tools).hexdigest()[:_DIGEST_CHARS], "effort": effort}
    return {name: value for name, value in shown.items() if value and isinstance(value, str)}


async def _ids_of(engine: Engine, request: TurnRequest, prompt: ClientPrompt, *, at_start: bool) -> tuple[int, ...]:
    if prompt.messages is not None:
        ids = await engine.tokenize_chat(request, prompt.messages)
        return ids if at_start else await _without_bos(engine, request.model, ids)
    if prompt.token_ids is not None:
        return prompt.token_ids if at_start else await _without_bos(engine, request.model, prompt.token_ids)
    special = bool(request.template_fields.get("add_special_tokens", True)) and at_start
    return await engine.tokenize(request.model, prompt.text or "", add_special_tokens=special)


async def _without_bos(engine: Engine, model: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Drop a beginning-of-sequence token that stands in the middle of a conversation."""
    begin = await engine.tokenize(model, "", add_special_tokens=True)
    return ids[1:] if begin and len(ids) > 1 and ids[0] == begin[0] else ids


async def _prompt_segment(  # what was composed, and what it replaces
    engine: Engine,
    request: TurnRequest,
    prompt: ClientPrompt,
    ids: tuple[int, ...],
    transcript: Transcript,
    *,
    kept: int,
) -> Segment:
    """Return a client's prompt as a segment of these ids, behind the first `kept` segments of the transcript."""
    if prompt.messages is not None:
        said = transcript.identified(prompt.messages, kept=kept)
        if request.instructions and not kept:
            said = (said[0] | {RESPONSE: INSTRUCTIONS}, *said[1:])
        return Segment(SegmentKind.PROMPT, ids, messages_json=messages_json(said))
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


class _Frame(NamedTuple):
    """Tokens that the template puts around a conversation's words now. Other tools or another date change them."""

    before: tuple[int, ...]
    """The first words."""
    after: tuple[int, ...]
    """The last words; empty when it is not known for the last message."""


async def _frame(engine: Engine, request: TurnRequest, head: Transcript) -> _Frame | None:
    """Return the template's tokens around the messages of `head`; None: unknown."""
    opening = list(takewhile(lambda message: message["role"] in _HEAD_ROLES, head.messages))
    first = head.messages[len(opening) : len(opening) + 1]
    if not first:
        return None
    try:
        one, other = await asyncio.gather(
            *(
                engine.tokenize_chat(request, [*opening, {"role": first[0]["role"], "content": words}])
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
            engine.tokenize_chat(request, base, continue_final_message=True),
            engine.tokenize_chat(request, [*base, *messages]),
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


async def refuse_too_long(engine: Engine, request: TurnRequest, prompt: ClientPrompt) -> None:
    """Refuse a prompt of which a part alone has more tokens than the window. Raises ContextLengthExceeded."""
    if prompt.token_ids is not None:
        if len(prompt.token_ids) > SHORT_TOKENS:
            window = await engine.window(request.model)
            if len(prompt.token_ids) >= window:
                raise ContextLengthExceeded(
                    f"the prompt has {len(prompt.token_ids)} tokens, but the model's window has {window}"
                )
    elif prompt.messages is not None:
        await _refuse_long_chat(engine, request, prompt.messages)
    else:
        await _refuse_long_text(engine, request.model, prompt.text or "")


async def _refuse_long_text(engine: Engine, model: str, text: str) -> None:
    if len(text) <= SHORT_CHARS:
        return
    window = await engine.window(model)
    num_chars, num_tokens = CHARS_PER_TOKEN * window, 0
    for start in range(0, len(text), num_chars) if len(text) > num_chars else ():
        piece = await engine.tokenize(model, text[start : start + num_chars], add_special_tokens=False)
        num_tokens += len(piece) - CUT_TOKENS
        if num_tokens >= window:
            raise ContextLengthExceeded(f"the prompt has more than {window} tokens, the size of the model's window")


async def _refuse_long_chat(engine: Engine, request: TurnRequest, messages: Sequence[Mapping[str, Any]]) -> None:
    """Look at the text that every template shows first, then at the rest.

    Templates leave out a model's thoughts, and some leave out tools. Only the engine knows how much of an answer or a
    tool is shown. It renders the chat and refuses it by its length, as it does without a context.
    """
    shown = "".join(_text_of(message).strip() for message in messages if message["role"] in _SHOWN_ROLES)
    await _refuse_long_text(engine, request.model, shown)
    values = [*messages, request.template_fields]
    if not _is_longer(values, len(shown) + SHORT_CHARS):
        return
    if not _is_longer(values, len(shown) + CHARS_PER_TOKEN * await engine.window(request.model)):
        return
    body = {
        **request.template_fields,
        "model": request.model,
        "messages": list(messages),
        "max_tokens": 1,
        "cache_salt": secrets.token_hex(16),  # no KV of it is shared with a tenant
        **({"tool_choice": "none"} if "tools" in request.template_fields else {}),
    }
    try:
        await engine.ask(CHAT_PATH, body)
    except ContextLengthExceeded:
        raise
    except ContextCacheError:
        return  # another fault, which composing the prompt will meet and tell


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _is_longer(values: Sequence[Any], num_chars: int) -> bool:
    """Return whether texts and names in JSON values have more characters; a number or a truth value counts as one."""
    left, waiting = num_chars, [*values]
    while waiting and left >= 0:
        value = waiting.pop()
        if isinstance(value, Mapping):
            left -= sum(map(len, value))
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        else:
            left -= len(value) if isinstance(value, str) else 1
    return left < 0


async def _cut_to_fit(
    engine: Engine, request: TurnRequest, said: Truncation, transcript: Transcript, prompt: ComposedPrompt
) -> ComposedPrompt:
    """Return an appended turn's prompt, without its oldest turns where it does not fit (ADR 0056).

    Head and new text are never cut: a client that sends the conversation again chooses its content. Cut messages are
    composed as if the client had sent them so; of text and token ids the kept ids stay as they are. Either way the
    transcript becomes the prompt that the engine saw.
    """
    fields = request.engine_fields
    num_wanted = next(filter(None, (whole(fields.get(name)) for name in _ANSWER_TOKENS)), 1)
    limit = await engine.window(request.model) - max(1, num_wanted)
    fits = len(prompt.token_ids) <= limit
    if fits and (said.type is TruncationType.ROLLING or len(transcript.token_ids) <= said.tokens):
        return prompt
    is_chat = request.prompt.messages is not None
    if transcript.has_chat != is_chat or transcript.is_chat != is_chat:
        raise InvalidRequest("a context of both text and messages cannot be cut", param="truncation")
    cut = await (_cut_messages if is_chat else _cut_ids)(engine, request, said, transcript, prompt, limit)
    if cut is None:
        return prompt
    ids, rest = cut
    return replace(
        prompt,
        token_ids=ids,
        messages=rest.messages or (),
        context_tokens=common_prefix(ids, transcript.token_ids),
        keep_segments=0,
        segments=(await _prompt_segment(engine, request, rest, ids, transcript, kept=0),),
        truncated_tokens=max(0, len(prompt.token_ids) - len(ids)),
    )


async def _cut_messages(
    engine: Engine, request: TurnRequest, said: Truncation, transcript: Transcript, prompt: ComposedPrompt, limit: int
) -> tuple[tuple[int, ...], ClientPrompt] | None:
    """Return the ids and messages that stay; None: all of them. The kept part begins with a user's message."""
    new = request.prompt.messages
    assert new is not None
    head = tuple(takewhile(lambda message: message["role"] in _HEAD_ROLES, transcript.messages))
    history = transcript.messages[len(head) :]
    starts = [index for index, message in enumerate(history) if message["role"] == "user"]
    if new[0]["role"] != "tool":  # results stay with the calls they are of
        starts.append(len(history))

    def kept_from(start: int) -> tuple[dict[str, Any], ...]:
        return head + history[start:] + new

    async def ids_from(start: int) -> tuple[int, ...]:
        return await engine.tokenize_chat(request, kept_from(start))

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
    engine: Engine, request: TurnRequest, said: Truncation, transcript: Transcript, prompt: ComposedPrompt, limit: int
) -> tuple[tuple[int, ...], ClientPrompt] | None:
    """Return the ids that stay; None: all of them. The token that begins every sequence of the model is the head."""
    stored = transcript.token_ids
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
