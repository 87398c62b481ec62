"""What happens to a stack between the turns of random conversations: its caches emptied, its parts killed, turns moved.

Each event draws from a generator of its own, so that one that cannot be now (an engine is starting) changes no later
one.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

from tests.kit.faults.reference import ColdEngine
from tests.kit.stack import Stack

_FILLER_TOKENS = 1900
_FILLERS = 5
"""Together more than an engine's whole cache."""


class StackEvents:
    """`happen` lets one thing happen at random; `close` waits for what is still starting."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.seen: Counter[str] = Counter()
        """What was counted: events, and by the run turns and sources."""
        self.spent_s: dict[str, float] = defaultdict(float)
        """Seconds by what they went into."""
        self.steps: list[str] = []
        """What was done, in order."""
        self._engines = [ColdEngine(url) for url in stack.engine_urls]
        self._random = Random(0)
        self._away: int | None = None
        """The engine that was killed and is starting, if one is."""
        self._starting: Future[None] | None = None
        self._starter = ThreadPoolExecutor(1)

    def close(self) -> None:
        """Wait for an engine that is starting."""
        self._starter.shutdown()
        for engine in self._engines:
            engine.close()

    @property
    def present(self) -> list[int]:
        """The engines that are there."""
        return [index for index in range(len(self._engines)) if index != self._away]

    @property
    def cold_engine(self) -> ColdEngine:
        """An engine that is there, to be asked directly."""
        return self._engines[self.present[0]]

    def happen(self, random: Random) -> None:
        """Let one thing happen, mostly little. Raises what the start of an engine raised."""
        self._end_of_start()
        self._random = random
        events: dict[Callable[[], None], int] = {
            self._nothing: 50,
            self._forget_prefixes: 30,
            self._fill: 3,
            self._kill_sidecar: 4,
            self._end_sidecar: 4,
            self._kill_manager: 2,
            **({self._move: 12} if len(self._engines) > 1 else {}),
        }
        event = random.choices(tuple(events), weights=tuple(events.values()))[0]
        if self._starting and event not in (self._nothing, self._forget_prefixes, self._fill):
            return  # the stack starts one part at a time
        with self.timed(event.__name__.strip("_").replace("_", " ")):
            event()

    def kill_engine(self, random: Random) -> None:
        """SIGKILL one engine and start it again, its cache empty. With another one there, turns go on meanwhile.

        Nothing happens while an engine is still starting, which takes minutes where the machine is busy.
        """
        self._end_of_start()
        if self._starting:
            return
        engines = self.stack.engines
        if len(engines) > 1:
            self._drain(None)
        engine = random.choice(engines)
        self.note_event("engine killed and started")
        self.stack.kill(engine)
        if len(engines) == 1:
            self.stack.start(engine)
            return
        self._away = engines.index(engine)
        self._starting = self._starter.submit(self.stack.start, engine)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the seconds this takes."""
        began_s = time.monotonic()
        yield
        self.spent_s[what] += time.monotonic() - began_s

    def note(self, what: str) -> None:
        """Add a step."""
        self.steps.append(what)

    def note_event(self, what: str) -> None:
        """Add a step and count it."""
        self.seen[what] += 1
        self.note(what)

    def _end_of_start(self) -> None:
        if self._starting is None or not self._starting.done():
            return
        self._starting.result()
        self._starting = self._away = None
        self.note("the engine is there again")

    def _nothing(self) -> None:
        pass

    def _forget_prefixes(self) -> None:
        self.note_event("engine's prefix cache emptied")
        self.stack.forget_prefixes([self.stack.engine_urls[index] for index in self.present])

    def _fill(self) -> None:
        """Push everything out of the engine's cache by other work."""
        self.note_event("engine's cache filled by others")
        for index in self.present:
            for _ in range(_FILLERS):
                prompt = [self._random.randint(0, 255) for _ in range(_FILLER_TOKENS)]
                self._engines[index].answer(prompt, max_tokens=1)

    def _kill_sidecar(self) -> None:
        self._restart(self._random.choice(self.stack.sidecars))

    def _end_sidecar(self) -> None:
        """SIGTERM and start: its memory tier is empty, its index rebuilt from the files."""
        sidecar = self._random.choice(self.stack.sidecars)
        self.note_event("sidecar ended and started")
        self.stack.terminate(sidecar)
        self.stack.start(sidecar)

    def _kill_manager(self) -> None:
        self._restart("manager")

    def _move(self) -> None:
        """Let another engine get all turns: it finds the KV at its peer's sidecar."""
        drained = self._random.choice(self.stack.engines)
        self.note_event("turns moved to another engine")
        self._drain(drained)

    def _drain(self, drained: str | None) -> None:
        """Let no engine but this one drain; those that get work again do so first, so that one always does."""
        for engine in sorted(self.stack.engines, key=lambda engine: engine == drained):
            self.stack.drain(engine, draining=engine == drained)

    def _restart(self, part: str) -> None:
        self.note_event(f"{part.partition('-')[0]} killed and started")
        self.stack.restart(part)
