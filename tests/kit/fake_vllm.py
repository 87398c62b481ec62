"""vLLM's HTTP surface as an ASGI application with a toy tokenizer, for tests of the turn without an engine.

A token is one character (its code point); a chat message renders as `<role>content[tool calls]` plus END, text in
parts with line ends between them; a template argument `enable_thinking: false` closes the thoughts before they begin.
The answers have the shapes vLLM 0.32 sends, JSON and SSE, token ids and usage included.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

EOS = 3
SILENT = 4
GENERATION = "<assistant>"


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(ids: list[int]) -> str:
    # Ids beyond what letters there are show as one that stands for none, as with a real tokenizer.
    return "".join(chr(token) if token < 0x110000 else "\ufffd" for token in ids)


def _said(message: dict[str, Any]) -> str:
    """What the chat template shows of a message: text, tool calls with their arguments as values."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return message.get("tool_call_id", "") + text + _called(message.get("tool_calls") or ())


def _described(tool: dict[str, Any]) -> str:
    return tool["function"].get("description") or ""


def _called(calls: Any) -> str:
    return "".join(f"[{call['id']} {call['function']['name']} {_arguments(call)}]" for call in calls)


def _arguments(call: dict[str, Any]) -> str:
    return json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)


@dataclass
class FakeVllm:
    """Answers `answer(prompt_ids)`; ends with EOS unless `finish_reason` says `length`."""

    answer: Callable[[list[int]], str] = lambda ids: "!"
    calls: tuple[dict[str, Any], ...] = ()
    """Tool calls at the end of every chat answer."""
    reasoning: str = ""
    """Reasoning before the text of every chat answer."""
    invisible: int = 0
    """Tokens of every answer that have no text, as special tokens have none."""
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    bos: list[int] = field(default_factory=list)
    max_model_len: int = 10_000
    model: str | None = None
    """The only one that it has; None: any."""
    break_off_after: int | None = None
    """Return without an end after this many stream events."""
    fail_after: int | None = None
    """Send an error event after this many stream events, then `[DONE]`."""
    pause: asyncio.Event | None = None
    """Awaited before the last events, so that a test can act in the middle of an answer."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_tokenized: int = 0
    """Characters of text that were tokenised."""
    comment: bytes = b""
    """Sent before the first event of a stream, as a keep-alive is."""
    chunk_bytes: int | None = None
    """Cut the stream into pieces of this size."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = json.loads(body) if body else {}
        self.requests.append((scope["path"], request))
        route = {
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._complete,
            "/v1/responses": self._respond,
        }.get(scope["path"])
        if route is None:
            await _json(send, 404, {"error": {"message": "Not Found"}})
            return
        if self.model is not None and request.get("model") not in (None, self.model):
            await _json(send, 404, {"error": {"message": f"The model `{request.get('model')}` does not exist."}})
            return
        await route(scope, request, send)

    def generations(self) -> list[dict[str, Any]]:
        """Bodies of the completion calls, in order."""
        return [body for path, body in self.requests if path.startswith("/v1/")]

    def render(
        self, messages: list[dict[str, Any]], *, generate: bool, open_end: bool, tools: Any = (), thinks: bool = True
    ) -> list[int]:
        ids = list(self.bos)
        ids += encode("".join(f"<tool>{tool['function']['name']}{_described(tool)}" for tool in tools or ()))
        for index, message in enumerate(messages):
            ids += encode(f"<{message['role']}>{_said(message)}")
            if not (open_end and index == len(messages) - 1):
                ids += [EOS, ord("\n")]
        return ids + (encode(GENERATION + ("" if thinks else "<think></think>")) if generate else [])

    async def _tokenize(self, scope: Any, request: dict[str, Any], send: Any) -> None:
        # As with vLLM 0.32, whatever the length.
        if "messages" in request:
            ids = self.render(
                request["messages"],
                generate=request.get("add_generation_prompt", True),
                open_end=request.get("continue_final_message", False),
                tools=request.get("tools"),
                thinks=(request.get("chat_template_kwargs") or {}).get("enable_thinking", True),
            )
        else:
            ids = (self.bos if request["add_special_tokens"] else []) + encode(request["prompt"])
        self.num_tokenized += len(ids)
        await _json(send, 200, {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def _detokenize(self, scope: Any, request: dict[str, Any], send: Any) -> None:
        await _json(send, 200, {"prompt": decode(request["tokens"])})

    async def _complete(self, scope: Any, request: dict[str, Any], send: Any) -> None:
        chat = scope["path"] == "/v1/chat/completions"
        params = request.get("kv_transfer_params") or {}
        if chat and "prompt_token_ids" in params:
            ids = params["prompt_token_ids"]
        elif chat:
            ids = self.render(request["messages"], generate=True, open_end=False, tools=request.get("tools"))
        else:
            ids = request["prompt"] if isinstance(request["prompt"], list) else encode(request["prompt"])
        # A token is a character here: vLLM refuses by the number of characters, and tokenises no text that is too long.
        if len(ids) >= self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
            await _json(send, 400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
            return
        if "messages" in request and "prompt_token_ids" not in params:
            self.num_tokenized += len(ids)
        text = self.answer(ids)[: request.get("max_tokens") or 1000]
        out = [SILENT] * self.invisible + encode(self.reasoning + text + (_called(self.calls) if chat else ""))
        out += [EOS] if self.finish_reason == "stop" and self.stop_reason is None else []
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(out),
            "total_tokens": len(ids) + len(out),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": len(self.reasoning)},
        }
        if request.get("stream"):
            await self._stream(send, request, chat, ids, text, out, usage)
            return
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": out,
        }
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": [*self.calls], "refusal": None}
            choice["message"]["reasoning"] = self.reasoning or None
        else:
            choice |= {"text": text, "prompt_token_ids": ids, "logprobs": None}
        await _json(
            send,
            200,
            {
                "id": "cmpl-1",
                "object": "chat.completion" if chat else "text_completion",
                "created": 1,
                "model": request["model"],
                "choices": [choice],
                "usage": usage,
                "kv_transfer_params": params,
            },
        )

    async def _respond(self, scope: Any, request: dict[str, Any], send: Any) -> None:
        if "input" not in request or not isinstance(request.get("model"), str):
            await _json(send, 400, {"error": {"message": "input and model are required", "code": 400}})
            return
        params = request.get("kv_transfer_params") or {}
        ids = params.get("prompt_token_ids") or encode(json.dumps(request["input"]))
        text = self.answer(ids)
        out = encode(text + _called(self.calls)) + ([EOS] if self.finish_reason == "stop" else [])
        parts = [{"type": "output_text", "text": text, "annotations": []}]
        output: list[Any] = [{"type": "message", "id": "msg_1", "role": "assistant", "content": parts}] if text else []
        output += [
            {"type": "function_call", "id": "fc", "call_id": call["id"], "namespace": None, **call["function"]}
            for call in self.calls
        ]
        usage = {
            "input_tokens": len(ids),
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(out),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(ids) + len(out),
        }
        status = "incomplete" if self.finish_reason == "length" else "completed"
        whole = _response(request, status, output=output, usage=usage, kv_transfer_params=params)
        if not request.get("stream"):
            await _json(send, 200, whole)
            return
        begun = _response(request, "in_progress", output=[], usage=None)
        told = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        told += [{"type": "response.output_text.delta", "item_id": "msg_1", "delta": letter} for letter in text]
        told.append({"type": "response.completed", "response": whole})
        stream = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in told]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        if self.comment:
            await send({"type": "http.response.body", "body": self.comment, "more_body": True})
        for index, event in enumerate(stream):
            if self.break_off_after is not None and index >= self.break_off_after:
                return
            size = self.chunk_bytes or len(event)
            for start in range(0, len(event), size):
                await send({"type": "http.response.body", "body": event[start : start + size], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _deltas(self, text: str) -> Iterator[dict[str, Any]]:
        yield from ({"reasoning": letter} for letter in self.reasoning)
        yield from ({"content": letter} for letter in text)
        for index, call in enumerate(self.calls):
            name, arguments = {"name": call["function"]["name"]}, call["function"]["arguments"]
            parts = [{"id": call["id"], "type": "function", "function": name | {"arguments": arguments[:3]}}]
            parts += [{"function": {"arguments": arguments[3:]}}]
            deltas = [{"tool_calls": [{"index": index, **part}]} for part in parts]
            yield from deltas + [{}] * (len(_called((call,))) - len(deltas))

    async def _stream(self, send: Any, request: Any, chat: bool, ids: Any, text: str, out: Any, usage: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        if self.comment:
            await send({"type": "http.response.body", "body": self.comment, "more_body": True})
        kind = "chat.completion.chunk" if chat else "text_completion"
        frame = {"id": "cmpl-1", "object": kind, "created": 1, "model": request["model"]}
        events: list[Any] = []
        if chat:
            delta = {"role": "assistant", "content": ""}
            events.append({**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        deltas = iter(self._deltas(text) if chat else ())
        for position, token in enumerate(out):
            last = position == len(out) - 1
            piece = decode([token]) if token != EOS else ""
            delta = {"content": piece} if token == SILENT else next(deltas, {})
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": self.finish_reason if last else None,
                "stop_reason": self.stop_reason if last else None,
                "token_ids": [token],
            }
            choice |= {"delta": delta} if chat else {"text": piece}
            if position == 0:
                choice["prompt_token_ids"] = ids
            events.append({**frame, "choices": [choice]})
        options = request.get("stream_options") or {}
        if options.get("include_usage") and options.get("continuous_usage_stats"):
            num_made = 0
            for event in events:  # vLLM 0.32 adds no details here: it tells the cached tokens at the end only
                num_made += len(event["choices"][0].get("token_ids", ()))
                counts = {"prompt_tokens": len(ids), "completion_tokens": num_made}
                event["usage"] = counts | {"total_tokens": sum(counts.values())}
        if options.get("include_usage"):
            events.append({**frame, "choices": [], "usage": usage})
        if not request.get("return_token_ids"):
            for choice in (choice for event in events for choice in event["choices"]):
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        stream = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
        if self.fail_after is not None:
            stream[self.fail_after : -1] = [b'data: {"error": {"message": "boom", "code": 500}}\n\n']
        for index, event in enumerate(stream):
            if self.break_off_after is not None and index >= self.break_off_after:
                return
            if self.pause is not None and index == len(stream) - 3:
                await self.pause.wait()
            size = self.chunk_bytes or len(event)
            for start in range(0, len(event), size):
                await send({"type": "http.response.body", "body": event[start : start + size], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _response(request: dict[str, Any], status: str, **more: Any) -> dict[str, Any]:
    echoed = {key: request.get(key) for key in ("instructions", "metadata", "previous_response_id")}
    return {"id": "resp_0123", "object": "response", "model": request["model"], "status": status, **echoed, **more}


async def _json(send: Any, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
