"""The toy vLLM, as strict as vLLM with what it is sent: a body that is none is the client's fault, not a crash."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.fake_vllm import FakeVllm, _json

_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")


class StrictVllm(FakeVllm):
    """Refuses as vLLM does: 405 with `Allow`, 400 for what is not the API's shape; ignores fields it does not know."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path in _PATHS and scope["method"] != "POST":
            await send({"type": "http.response.start", "status": 405, "headers": [(b"allow", b"POST")]})
            await send({"type": "http.response.body", "body": b""})
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        if fault := _fault(path, raw) if path in _PATHS else _json_fault(raw):
            error = {"message": fault, "type": "BadRequestError", "code": 400}
            await _json(send, 400, {"error": error})
            return
        if path in _PATHS:
            body = json.loads(raw)
            raw = json.dumps(
                body | ({"max_tokens": int(body["max_tokens"])} if body.get("max_tokens") else {})
            ).encode()
        given = {"type": "http.request", "body": raw, "more_body": False}

        async def again() -> Any:
            return given

        await super().__call__(scope, again, send)


def _json_fault(raw: bytes) -> str:
    try:
        json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        return "the body is not JSON"
    return ""


def _fault(path: str, raw: bytes) -> str:
    """Return what is wrong with a request, or nothing."""
    if fault := _json_fault(raw):
        return fault
    body = json.loads(raw or b"null")
    if not isinstance(body, dict):
        return "the body is not an object"
    if not isinstance(body.get("model"), str) or not body["model"]:
        return "model: a string is wanted"
    if path == "/detokenize":
        return "" if _are_ids(body.get("tokens")) else "tokens: ids are wanted"
    for name in ("stream", "stream_options"):
        if name in body and body[name] is not None and not isinstance(body[name], bool | dict):
            return f"{name}: wrong type"
    limit = body.get("max_tokens")
    if limit is not None and not _is_whole(limit):
        return "max_tokens: 0 or more"
    return _prompt_fault(path, body)


def _prompt_fault(path: str, body: dict[str, Any]) -> str:
    if path == "/v1/responses":
        return "" if isinstance(body.get("input"), str | list) else "input: text or items are wanted"
    if "chat" in path or "messages" in body:
        if "prompt_token_ids" in (body.get("kv_transfer_params") or {}):
            return ""
        messages = body.get("messages")
        fine = isinstance(messages, list) and all(map(_is_message, messages))
        return "" if fine and messages else "messages: a list of messages is wanted"
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        # A lone surrogate is no text that a tokenizer takes.
        return "" if _is_text(prompt) else "prompt: not Unicode"
    return "" if prompt and _are_ids(prompt) else "prompt: text or token ids are wanted"


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return content is None or isinstance(content, str)


def _is_whole(value: Any) -> bool:
    return (type(value) is int or (isinstance(value, float) and value.is_integer())) and value >= 0


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 32 for item in value)


def _as_character(token: int) -> int:
    """Return what the toy decodes a token as: its tokens are characters, and a client's need not be."""
    return token if token < 0x110000 and not 0xD800 <= token < 0xE000 else ord("?")
