"""vLLM's routes as a small ASGI application: a token is a character. Streams have a pace, and cost next to nothing.

`python -m benchmarks.turn.fake_vllm --port PORT` serves it. `--middleware NAME` puts an ASGI middleware around it, as
vLLM's argument of this name did.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from typing import Any

import uvicorn

MODEL = "fake"
WINDOW = 1 << 20
_PACE_S = 0.02
"""Time between two tokens of a stream."""
_TEXT_EVENT = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON = [(b"content-type", b"application/json")]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer one request, or live as long as the server."""
    if scope["type"] == "lifespan":
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})
        return
    raw = b""
    while (message := await receive())["type"] == "http.request":
        raw += message.get("body", b"")
        if not message.get("more_body"):
            break
    body = json.loads(raw) if raw else {}
    if scope["path"] == "/tokenize":
        tokens = list(body.get("prompt", "").encode())
        await _whole(send, {"tokens": tokens, "count": len(tokens), "max_model_len": WINDOW})
    elif scope["path"] == "/detokenize":
        await _whole(send, {"prompt": "a" * len(body["tokens"])})
    elif not scope["path"].startswith("/v1/"):
        await _whole(send, {})
    elif body.get("stream"):
        await _stream(send, body)
    else:
        choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length", "token_ids": [97]}
        await _whole(send, {**_head(), "choices": [choice], "usage": _usage(body, 1)})


async def _stream(send: Any, body: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _TEXT_EVENT})
    count, loop = int(body.get("max_tokens", 16)), asyncio.get_running_loop()
    began_s = loop.time()
    for number in range(count):
        last = number == count - 1
        choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length" if last else None}
        if body.get("return_token_ids"):
            choice |= {"token_ids": [97]}
        await _event(send, {**_head(), "choices": [choice]})
        await asyncio.sleep(max(began_s + (number + 1) * _PACE_S - loop.time(), 0))
    if (body.get("stream_options") or {}).get("include_usage"):
        await _event(send, {**_head(), "choices": [], "usage": _usage(body, count)})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _event(send: Any, event: dict[str, Any]) -> None:
    data = b"data: %b\n\n" % json.dumps(event).encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _whole(send: Any, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _head() -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "created": 1_760_000_000, "model": MODEL}


def _usage(body: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
    prompt_tokens = len(body.get("prompt") or ())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--middleware", default="", help="module.Class")
    options = parser.parse_args()
    served: Any = application
    if options.middleware:
        module, _, name = options.middleware.rpartition(".")
        served = getattr(importlib.import_module(module), name)(application)
    uvicorn.run(served, port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
