"""`python -m tests.kit.faults.races_pod`: the real turn process with a toy engine inside, which tests kill.

The toy's tokens are characters; its answer follows from the whole prompt (races_model.answer_to); a stream takes its
time. `TURN_…` variables set it up.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Self

from tests.kit.fake_vllm import FakeVllm, decode
from tests.kit.faults.races_model import answer_to
from tests.kit.turn_pod import _Engine
from vllm_plugin.turn import __main__ as turn

HELD = "leaving"
"""In a prompt: the answer stops after a few pieces until its client has left."""
_FEW_PIECES = 3


class PacedEngine(_Engine):
    """Waits before each piece of an answer, and stops when its client leaves, as vLLM does."""

    def __init__(self, engine: FakeVllm, pace_s: float) -> None:
        super().__init__(engine)
        self._pace_s = pace_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].endswith("/completions"):
            await super().__call__(scope, receive, send)
            return

        body = await receive()
        prompt = json.loads(body["body"]).get("prompt", ())
        pieces_left = _FEW_PIECES if f"<{HELD}" in (prompt if isinstance(prompt, str) else decode(prompt)) else None

        async def paced(message: Any) -> None:
            nonlocal pieces_left
            await asyncio.sleep(self._pace_s)
            if pieces_left is not None:
                pieces_left -= 1
                if pieces_left < 0:
                    await asyncio.Event().wait()  # cancelled when the client leaves
            await send(message)

        async def whole() -> Any:
            return body

        answering = asyncio.create_task(super().__call__(scope, whole, paced))
        leaving = asyncio.create_task(receive())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                if not task.done():
                    task.cancel()
            await asyncio.wait((answering, leaving))
        if not answering.cancelled():
            answering.result()


if __name__ == "__main__":
    engine = FakeVllm(answer=lambda ids: answer_to(decode(ids)), max_model_len=1 << 20)
    turn.Forwarder = lambda *_, **__: PacedEngine(engine, float(os.environ["POD_PACE_S"]))  # type: ignore[assignment,misc]
    turn.main()
