"""Dialect of a route. The one here is the engine's own, of completions and chats. The others extend it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contextcache.model import SessionId, UsageFormat
from vllm_plugin.turn.answer.chat import JsonAnswer, SseAnswer
from vllm_plugin.turn.prompt.request import TurnRequest, read_turn
from vllm_plugin.turn.turn import Turn


class Dialect:
    """Translates a request into a turn, the turn into the engine's request, and its answer into the client's."""

    def turn(
        self,
        path: str,
        body: dict[str, Any],
        headers: Mapping[str, str],
        raw: bytes,  # noqa: ARG002  # the others read it
        named: SessionId | None,  # noqa: ARG002  # the others read it
    ) -> TurnRequest:
        """Check a request, `raw` as it came, of the context it was routed for. Raises InvalidRequest."""
        return read_turn(path, body, headers)

    def asking(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the engine's path and body, from those of a completion or a chat."""
        return path, body

    def answer(self, turn: Turn) -> JsonAnswer | SseAnswer:
        """Return a reader of the engine's answer that writes the client's."""
        if not turn.request.stream:
            return JsonAnswer(turn.request)
        return SseAnswer(turn.request, counts_whole_prompt=turn.usage is UsageFormat.OPENAI)
