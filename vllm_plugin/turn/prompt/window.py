"""A prompt that cannot fit the model's window is refused before all of it is tokenised.

Tokenising takes a second per megabyte and holds up every other request of the pod. The beginning of a long prompt is
enough to refuse it: a text that begins with more tokens than the window has cannot fit, however it goes on. Only the
client's new text is checked: `truncation` cuts stored history, never new text.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from contextcache.errors import ContextCacheError, ContextLengthExceeded
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.prompt.request import CHAT_PATH, ClientPrompt, TurnRequest

SHORT_TOKENS = 1024
"""Longer lists of ids are compared with the window first."""
CHARS_PER_TOKEN = 16
"""Length of a piece, in characters per token of the window. Most text has four characters a token, so its first piece
is too long already. Runs of spaces have up to 128, and take several."""
SHORT_CHARS = CHARS_PER_TOKEN * SHORT_TOKENS
"""Longer texts are looked at: a shorter one is tokenised in milliseconds."""
CUT_TOKENS = 64
"""Tokens by which two pieces may have more than both together: a cut changes only the tokens next to it."""
_SHOWN_ROLES = frozenset({"system", "user"})


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
    whole = [*messages, request.template_fields]
    if not _is_longer(whole, len(shown) + SHORT_CHARS):
        return
    if not _is_longer(whole, len(shown) + CHARS_PER_TOKEN * await engine.window(request.model)):
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
