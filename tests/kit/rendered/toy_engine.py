"""A program in vLLM's place, with its arguments: the toy of `fake_vllm` on vLLM's port, over TLS if vLLM has it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import uvicorn

from tests.kit.fake_vllm import FakeVllm

TOY = [sys.executable, "-m", "tests.kit.rendered.toy_engine"]
"""Its command, before vLLM's arguments."""
METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


class ToyEngine:
    """The pages that gateway, kubelet and Prometheus ask for; the rest is the toy's."""

    def __init__(self, model: str) -> None:
        self._toy = FakeVllm(model=model, cached_tokens=1)
        self._pages = {
            "/health": b"{}",
            "/v1/models": json.dumps({"data": [{"id": model}]}).encode(),
            "/metrics": METRICS,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (page := self._pages.get(scope["path"])) is None:
            await self._toy(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": page})


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("host", "served-model-name", "ssl-certfile", "ssl-keyfile"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int)
    given, _ = parser.parse_known_args()
    uvicorn.run(
        ToyEngine(given.served_model_name),
        host=given.host,
        port=given.port,
        ssl_certfile=given.ssl_certfile,
        ssl_keyfile=given.ssl_keyfile,
        lifespan="off",
        access_log=False,
    )


if __name__ == "__main__":
    main()
