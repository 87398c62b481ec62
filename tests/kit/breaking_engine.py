"""An engine that breaks off, for answers that continue elsewhere: vLLM's detokeniser and stop strings in small.

A token is some bytes, so that a character may need several tokens, and a stop string may begin inside one. The next
token is a function of all ids before it. A greedy answer is therefore the same on every engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = [
    *(bytes([letter]) for letter in b"abcdefgh .,\n"),
    *(b" the", b"ing", b"stop", b"END", b"## ", b"a b c"),
    *("é".encode(), "漢".encode(), "漢".encode()[:1], "漢".encode()[1:], "🦜".encode()[:2], "🦜".encode()[2:]),
]
"""Two characters have no token of their own, so most partial ones never become whole, as with a bad model."""
EOS = len(VOCABULARY)
FIRST_BYTE = 1000
"""Ids from here on are single bytes, of which prompts are made."""


def encode(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def decode(ids: list[int]) -> str:
    return b"".join(_bytes(token) for token in ids).decode("utf-8", "replace")


def _bytes(token: int) -> bytes:
    if token >= FIRST_BYTE:
        return bytes([token - FIRST_BYTE])
    return b"" if token == EOS else VOCABULARY[token]


def greedy(ids: list[int]) -> int:
    digest = hashlib.sha256(repr(list(ids)).encode()).digest()
    if VOCABULARY[ids[-1]] if ids[-1] < EOS else b"":
        begun = VOCABULARY[ids[-1]]
        for whole in ("漢", "🦜"):
            if whole.encode().startswith(begun) and begun != whole.encode() and digest[2] < 250:
                return VOCABULARY.index(whole.encode()[len(begun) :])
    if digest[0] == 0:
        return EOS
    return digest[1] % (len(VOCABULARY) - 1 if digest[2] < 30 else 18)


@dataclass
class Step:
    """What one event tells."""

    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | None = None


def answer(prompt: list[int], request: dict[str, Any], *, interval: int) -> Iterator[Step]:
    """Yield vLLM's steps (0.32 v1/engine/detokenizer.py)."""
    stops = request.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    keeps = request.get("include_stop_str_in_output", False)
    held = 0 if keeps else max(map(len, stops), default=1) - 1
    limit = request.get("max_completion_tokens", request.get("max_tokens", 16))
    least = request.get("min_tokens", 0)
    ids: list[int] = []
    text, sent, finish, stop_reason = "", 0, None, None
    # Text of a prompt that ends inside a character is given again with the character, as by tokenizers' DecodeStream.
    begun = prompt[-40:]
    told = "" if decode(begun).endswith("\ufffd") else decode(begun)
    while finish is None:
        step: list[int] = []
        while len(step) < interval and finish is None:
            token = greedy([*prompt, *ids])
            ids.append(token)
            step.append(token)
            whole = decode([*begun, *ids])
            new = "" if whole.endswith("\ufffd") or len(whole) <= len(told) else whole[len(told) :]
            told += new
            text += new
            found = []
            if len(ids) > least:
                for stop in stops:
                    at = text.find(stop, max(0, len(text) - len(new) - len(stop) + 1))
                    if new and at >= 0:
                        found.append((at + len(stop), at, stop))
            if found:
                end, at, stop_reason = min(found, key=lambda one: one[0])
                text, finish = text[: end if keeps else at], "stop"
            elif token == EOS and len(ids) > least:
                finish = "stop"
            elif len(ids) == limit:
                finish = "length"
        end = max(sent, len(text) if finish else len(text) - held)
        piece, sent = text[sent:end], end
        yield Step(step, piece, finish, stop_reason)


@dataclass
class BreakingEngine:
    """vLLM's routes. `breaks`: for each generation, the events after which it breaks off, and how; empty: it does not.

    `raise`: the connection breaks. `return`: it closes. `error`, `abort`: an event says so. `silent`: no event follows.
    `away`: the engine answers 503.
    """

    name: str = "engine"
    interval: int = 1
    breaks: list[tuple[int, str]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    health: int = 200
    refusals: int = 0
    """Health checks that fail first."""
    cached_tokens: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request, path = json.loads(body or b"{}"), scope["path"]
        if path == "/health":
            self.refusals -= 1
            await _whole(send, 503 if self.refusals >= 0 else self.health, {})
        elif path == "/tokenize":
            said = (f"<{one['role']}>{one['content']}" for one in request.get("messages", ()))
            text = request.get("prompt", "".join(said))
            await _whole(send, 200, {"tokens": encode(text), "max_model_len": 100_000})
        elif path == "/detokenize":
            await _whole(send, 200, {"prompt": decode(request["tokens"])})
        else:
            self.requests.append(request)
            await self._generate(path.endswith("chat/completions"), request, receive, send)

    async def _generate(self, chat: bool, request: dict[str, Any], receive: Any, send: Any) -> None:
        after, how = self.breaks.pop(0) if self.breaks else (1 << 30, "")
        if how == "away":
            await _whole(send, 503, {"error": {"message": "starting"}})
            return
        params = request.get("kv_transfer_params") or {}
        prompt = params.get("prompt_token_ids") if chat else request.get("prompt")
        if not isinstance(prompt, list):
            said = request.get("prompt") or "".join(f"<{one['role']}>{one['content']}" for one in request["messages"])
            prompt = encode(said)
        frame = {
            "id": f"{self.name}-{len(self.requests)}",
            "object": "chat" if chat else "text",
            "created": len(self.requests),
        }
        frame["model"] = request["model"]
        if not request.get("stream"):
            await self._answer_whole(chat, request, prompt, frame, how, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for sent, event in enumerate(self._events(chat, request, prompt, frame)):
            if sent == after:
                break
            if not request.get("return_token_ids"):
                for told in (event, *event["choices"]):
                    told.pop("token_ids", None)
                    told.pop("prompt_token_ids", None)
            await _event(send, event)
        else:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if how == "raise":
            raise ConnectionResetError("the engine died")
        if how == "silent":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if how == "error":
            await _event(send, {"error": {"message": "EngineCore died", "code": 500}})
        elif how == "abort":
            choice = {"index": 0, "finish_reason": "abort", "token_ids": []}
            choice |= {"delta": {"content": "held"}} if chat else {"text": "held"}
            await _event(send, {**frame, "choices": [choice]})
            await _event(send, {**frame, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
        if how != "return":
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _events(self, chat: bool, request: dict[str, Any], prompt: list[int], frame: Any) -> Iterator[dict[str, Any]]:
        if chat:
            delta = {"role": "assistant", "content": ""}
            yield {
                **frame,
                "prompt_token_ids": prompt,
                "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
            }
        made = offset = 0
        counts: dict[str, Any] = {}
        for step in answer(prompt, request, interval=self.interval):
            choice = {"index": 0, "finish_reason": step.finish_reason, "stop_reason": step.stop_reason}
            choice |= {"token_ids": step.token_ids, "logprobs": None}
            choice |= {"delta": {"content": step.text}} if chat else {"text": step.text}
            if not chat and not made:
                choice["prompt_token_ids"] = prompt
            if request.get("logprobs") is not None and not chat:
                tokens = [decode([token]) for token in step.token_ids]
                offsets = [offset + sum(map(len, tokens[:at])) for at in range(len(tokens))]
                offset += sum(map(len, tokens))
                choice["logprobs"] = {"tokens": tokens, "text_offset": offsets}
            made += len(step.token_ids)
            counts = {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made}
            yield {**frame, "choices": [choice], "usage": counts}
        details = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        yield {**frame, "choices": [], "usage": counts | details}

    async def _answer_whole(self, chat: bool, request: Any, prompt: Any, frame: Any, how: str, send: Any) -> None:
        steps = list(answer(prompt, request, interval=1))
        ids = [token for step in steps for token in step.token_ids]
        reason = "abort" if how == "abort" else steps[-1].finish_reason
        choice = {"index": 0, "finish_reason": reason, "stop_reason": steps[-1].stop_reason, "token_ids": ids}
        text = "".join(step.text for step in steps)
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        body = {**frame, "choices": [choice], "usage": usage}
        if how == "error":
            await _whole(send, 500, {"error": {"message": "EngineCore died"}})
        elif how == "raise":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(body).encode()[:50], "more_body": True})
            raise ConnectionResetError("the engine died")
        else:
            await _whole(send, 200, body)


async def _event(send: Any, told: dict[str, Any]) -> None:
    await asyncio.sleep(0)
    raw = f"data: {json.dumps(told, separators=(',', ':'))}\n\n".encode()
    await send({"type": "http.response.body", "body": raw, "more_body": True})


async def _whole(send: Any, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
