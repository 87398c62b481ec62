"""An answer that outlives its engine: the same stream continues on the restarted engine, or on another pod.

Engines answer it in parts. The first part is the turn's own request. After a break, the next engine gets a request for
the rest (`answer/rest.py`). `searching.py` finds the engine. Each part saves its KV under a name of its own, and loads
the KV of the parts before.

Bounds: two more engines an answer, and a time without an engine. A client that leaves meanwhile ends the turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from opentelemetry.trace import get_current_span

from contextcache.errors import ContextCacheError, NoReadyEndpoint
from contextcache.names import new_cache_ref
from contextcache.phases import Phases
from vllm_plugin.turn.answer.chat import GIVEN_UP, JsonAnswer, SseAnswer
from vllm_plugin.turn.answer.delivery import Delivery, Settling
from vllm_plugin.turn.answer.rest import (
    REPLACED,
    CannotResume,
    Known,
    Rest,
    check_state,
    held_chars,
    rest_fields,
    tells_tokens,
    usage_event,
)
from vllm_plugin.turn.engine import Engine, Message
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.turn import AnsweredRequest
from vllm_plugin.turn.waiting import TurnPatience

log = logging.getLogger(__name__)

_ENGINES_MAX = 2
"""Engines that an answer is taken to. A request that kills engines kills no more than these."""
_CONTEXT_TOKENS = 16
"""Tokens before the answer with which its text is decoded: more than any character has."""
_PARTIAL_TOKENS_MAX = 8
"""Tokens at the end without a whole character; a character has four bytes at most."""


class Phase(Enum):
    """Phase of an answer."""

    ANSWERING = "answering"
    """An engine answers, or computes the prompt of the first part."""
    PAUSED = "paused"
    """The engine broke off; another is looked for."""
    ASKED = "asked"
    """Another engine is asked and has sent nothing of the rest."""
    WHOLE = "whole"
    LOST = "lost"


PHASES = Phases(
    [
        ([Phase.ANSWERING, Phase.ASKED], "engine broke", Phase.PAUSED),
        ([Phase.PAUSED], "rest asked", Phase.ASKED),
        ([Phase.ASKED], "rest begun", Phase.ANSWERING),
        ([Phase.ANSWERING, Phase.PAUSED, Phase.ASKED], "answer whole", Phase.WHOLE),
        ([Phase.ANSWERING, Phase.PAUSED, Phase.ASKED], "given up", Phase.LOST),
    ]
)


@dataclass
class Resuming:
    """Delivers one answer, part by part. Used by the request's task alone."""

    turn: AnsweredRequest
    settlement: Settling
    reader: Callable[[], JsonAnswer | SseAnswer]
    """Returns a reader of the engine's answer that writes the client's."""
    settings: TurnSettings
    metrics: TurnMetrics
    body_of: Callable[[Sequence[int], dict[str, Any]], dict[str, Any] | bytes]
    """Returns the engine's body for a prompt that ends with these ids of the answer, with fields that differ."""
    phase: Phase = Phase.ANSWERING
    _num_engines: int = 0
    _num_known: int = 0
    _status: int = 0
    _verdict: CannotResume | None = None
    _has_fault: bool = False
    """The delivery raised, not the engine."""
    _broke_s: float = 0.0
    """Time of the loop at the break; 0: none since a chunk arrived."""

    def __post_init__(self) -> None:
        """Take the request's search, and make the delivery."""
        self._search = self.turn.client.search
        self.delivery = Delivery(self.turn, self.settlement, self.reader, self._note_resumed)

    async def run(self) -> None:
        """Deliver the answer. Raises EngineFailed, NoReadyEndpoint when it came to no end, or took too long."""
        await self._ask(())
        while not self.delivery.complete:
            try:
                self._check_break()
                self._advance("engine broke")
                self._broke_s = self._broke_s or asyncio.get_running_loop().time()
                if await self._finished():
                    break
                await self._ask_rest(await self._find_engine())
            except CannotResume as exc:
                await self._give_up(str(exc))
                return
        self._advance("answer whole")

    def _advance(self, event: str) -> None:
        self.phase = PHASES.after(self.phase, event)

    async def _ask(self, known_ids: Sequence[int]) -> None:
        """Have the engine answer one part, to its end or to a break."""
        turn, patience = self.turn, TurnPatience(self.settings.engine_timeout_s)
        self.delivery.patience, self._status = patience, 0
        body = self.body_of(known_ids, rest_fields(turn.request, len(known_ids)))
        self._search.patiences.add(patience)
        try:
            async with patience.watching():
                await turn.client.engine.generate(
                    turn.request.path, body, patience.receive(self._search.receive), self._take
                )
        except TimeoutError:
            log.warning("engine did not end a request", extra={"session_id": turn.session_id})
        except Exception as exc:
            if self._has_fault:
                raise
            log.warning("engine broke off", extra={"reason": type(exc).__name__})
        finally:
            self._search.patiences.discard(patience)

    async def _take(self, message: Message) -> None:
        """Take one ASGI message of the engine's."""
        if self.delivery.complete or self._verdict is not None:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
        try:
            await self.delivery.take(message)
        except CannotResume as exc:
            self._verdict = exc
        except Exception:
            self._has_fault = True
            raise
        if self._verdict is not None or ((stream := self._stream) is not None and stream.needs_no_more):
            self.delivery.patience.lose("engine")  # it need not compute on

    @property
    def _stream(self) -> SseAnswer | None:
        """The answer, if it is a stream that can be continued."""
        return self.delivery.answer if isinstance(self.delivery.answer, SseAnswer) else None

    def _note_resumed(self) -> None:
        """Record that the rest has begun, if it has, before its first byte is delivered."""
        if self.phase is not Phase.ASKED:
            return
        turn = self.turn
        came_from = turn.holder or self.settings.endpoint_name
        turn.holder = self._search.at.name if self._search.at is not None else ""
        told: dict[str, str | int] = {
            "at_token": self._num_known,
            "from": came_from,
            "to": turn.holder or self.settings.endpoint_name,
            "paused_ms": round((asyncio.get_running_loop().time() - self._broke_s) * 1000),
        }
        turn.resumed.append(told)
        self._advance("rest begun")
        self._broke_s = 0.0
        self.metrics.resumed_answers.labels(outcome="own" if self._search.at is None else "standby").inc()
        get_current_span(turn.trace).add_event("answer resumed", told)
        log.info("answer resumed", extra={"session_id": turn.session_id, **told})

    def _check_break(self) -> None:
        """Raise CannotResume unless the engine broke off and another may be asked."""
        failure, patience = self.delivery.failure, self.delivery.patience
        if failure is not None and failure.http_status < 500:
            raise CannotResume("refused")
        self._search.check()
        if patience.lost_with not in ("", "engine"):
            raise CannotResume(patience.lost_with)
        if self._verdict is not None:
            raise self._verdict
        if not self.turn.request.stream and self.turn.client.keep_alive.has_begun:
            raise CannotResume("unread")
        has_given_up = self.delivery.answer.result.finish_reason in GIVEN_UP
        if failure is not None and self._status == 200 and not has_given_up:
            raise CannotResume("unreadable")

    async def _finished(self) -> bool:
        """End a stream that lacks no token, only its last events; return whether there is one."""
        if (stream := self._stream) is None or stream.result.finish_reason is None:
            return False
        token_ids = stream.result.token_ids
        stream.end(usage_event(self._known(token_ids), len(token_ids)))
        await self._without_engine(self.delivery.end())
        return True

    async def _without_engine(self, ending: Awaitable[None]) -> None:
        """Wait until the client has taken the end of its answer."""
        self.delivery.patience = patience = TurnPatience(self.settings.engine_timeout_s)
        try:
            async with patience.watching():
                await ending
        except TimeoutError:
            log.warning("client did not take its answer", extra={"session_id": self.turn.session_id})

    async def _find_engine(self) -> Known:
        """Find an engine that decodes the known tokens. Raises CannotResume."""
        # A standby that is not there has not been harmed by the request.
        self._num_engines += not (self._status == NoReadyEndpoint.http_status and self._search.at is not None)
        if self._num_engines > _ENGINES_MAX:
            raise CannotResume("limit")
        try:
            return await self._search.find(self._taken_over, since_s=self._broke_s)
        except ContextCacheError as exc:
            raise CannotResume("refused") from exc

    async def _taken_over(self, engine: Engine) -> Known:
        known = await self._known_at(engine)
        self.turn.client.engine = engine
        return known

    async def _known_at(self, engine: Engine) -> Known:
        """Return the part that the client has, with its text. Raises CannotResume, and the engine's errors."""
        request, result, prompt = self.turn.request, self.delivery.answer.result, self.turn.prompt_ids
        ids, shown = list(result.token_ids), result.text or result.tool_calls or result.has_reasoning
        if request.stream and shown and not (ids and prompt):
            raise CannotResume("unread")
        if not ids or not (shown or tells_tokens(request)) or not request.stream:
            return self._known(())
        check_state(request, result)
        rest_fields(request, len(ids))
        base = prompt[-_CONTEXT_TOKENS:]
        front = await engine.detokenize(request.model, base)
        text = await engine.detokenize(request.model, (*base, *ids))
        for _ in range(_PARTIAL_TOKENS_MAX):
            if text.endswith(REPLACED) and ids and not tells_tokens(request):
                text = await engine.detokenize(request.model, (*base, *ids[:-1]))
                del ids[-1]
        if text.endswith(REPLACED):
            raise CannotResume("partial_character")
        num_held = min(held_chars(request), len(text) - len(front))
        if not text.startswith(front + result.text) or len(text) - len(front + result.text) != num_held:
            raise CannotResume("text")
        return self._known(ids, text[len(front) :])

    def _known(self, ids: Sequence[int], text: str = "") -> Known:
        loaded, result = self.turn.loaded, self.delivery.answer.result
        return Known(
            {} if self._stream is None else self._stream.head,
            len(self.turn.prompt_ids),
            ids,
            text,
            len(result.text) if ids else 0,
            result.text_offset if ids else 0,
            None if not ids else 0 if loaded is None else loaded.device_tokens + loaded.loaded_tokens,
        )

    async def _ask_rest(self, known: Known) -> None:
        """Ask the engine that was found for the rest."""
        turn, result = self.turn, self.delivery.answer.result
        del result.token_ids[len(known.token_ids) :]
        self._num_known = len(known.token_ids)
        if turn.save_ref is not None and self._status != NoReadyEndpoint.http_status:
            turn.left_refs, turn.save_ref = (turn.save_ref, *turn.left_refs), new_cache_ref()
        turn.kv_at = self._search.at.kv_at if self._search.at is not None else ""
        self.delivery.begin_part(Rest(turn.request, known) if known.head else None)
        self._advance("rest asked")
        await self._ask(known.token_ids)

    async def _give_up(self, reason: str) -> None:
        """End the answer as its engine did. Raises EngineFailed, NoReadyEndpoint."""
        broke = reason != "refused" or self.phase is not Phase.ANSWERING  # else its first engine refused the request
        self._advance("given up")
        if reason == "client":
            self.delivery.patience.lost_with = reason
        if reason != "client" and broke:
            self.metrics.resumed_answers.labels(outcome=reason).inc()
            log.warning("answer not resumed", extra={"session_id": self.turn.session_id, "reason": reason})
        if (stream := self._stream) is not None and stream.error is not None:
            await self._without_engine(self.delivery.tell_error(stream.error))
        self.delivery.check_complete()
