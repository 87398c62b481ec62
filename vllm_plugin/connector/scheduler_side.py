"""The connector in the scheduler: chooses the loads and saves of requests. Does no I/O.

Rules. Only a signed token is obeyed, and it is verified once a request. vLLM's questions in its step are answered from
memory: `None` means that the look-up is in flight, and vLLM asks again. A request is promised at most its prompt
without the last token, and nothing after a load that failed. `PHASES` is the story of one load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from vllm.v1.request import RequestStatus

from contextcache.clock import Clock
from contextcache.errors import ForgedIdentity
from contextcache.identity import COMPUTED_SOON, KV_TRANSFER_KEY, SOON_MS, KVTransfer, verify_kv_transfer
from contextcache.model import CacheRef, Manifest
from contextcache.phases import Phases
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import restorable_tokens
from vllm_plugin.connector.engine_check import NULL_BLOCK
from vllm_plugin.connector.identity.adapters import UNKNOWN, KnownAdapters, are_mixed_up
from vllm_plugin.connector.identity.fingerprint import EngineIdentity
from vllm_plugin.connector.identity.sleeps import WeightsWord
from vllm_plugin.connector.loads.load_estimate import LoadEstimate
from vllm_plugin.connector.loads.lookup import Lookup, Lookups, Match, PendingSaves
from vllm_plugin.connector.metadata import Adapter, ArenaWord, LoadPlan, RankFacts, SavePlan, load_pieces
from vllm_plugin.connector.saves.running import RunningSaves, kept_blocks, save_plan, started_at_ms
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Connect
from vllm_plugin.connector.spin import IdleEngine, is_alone
from vllm_plugin.connector.telemetry import Counters, connector_tracer
from vllm_plugin.connector.transfer import Reporter

log = logging.getLogger(__name__)

_WEIGHTS_CHANGED = "weights_changed"
_RANKS_UNKNOWN = "ranks_unknown"
_SLOWER = "slower_than_computing"
_NOT_FOUND = Match(None)
_DECODED_TOKENS = 16
"""A request with more in a step computes its prompt; with fewer it may be decoding, drafts included."""


class LoadPhase(Enum):
    """Phase of a request's load."""

    LOOKING = "looking"
    """The look-up is in flight, or waits for facts of the ranks or of the adapter."""
    NOTHING = "nothing"
    """Nothing is loaded for this request: `Load.reason`."""
    FOUND = "found"
    """A manifest serves a part of the prompt. Whether a load of it pays is decided at each question."""
    PROMISED = "promised"
    """vLLM was told the number of tokens, and allocates blocks for them."""
    LOADING = "loading"
    """The workers write to the request's blocks, which hold no valid KV yet."""
    LOADED = "loaded"
    FAILED = "failed"
    """The request is computed. A second promise would fail again, 70 times a second."""


PHASES = Phases(
    [
        ({LoadPhase.LOOKING}, "find", LoadPhase.FOUND),
        ({LoadPhase.LOOKING, LoadPhase.FOUND, LoadPhase.PROMISED, LoadPhase.LOADED}, "give up", LoadPhase.NOTHING),
        ({LoadPhase.FOUND}, "promise", LoadPhase.PROMISED),
        # The engine had no room, or has preempted the request.
        ({LoadPhase.PROMISED, LoadPhase.LOADED}, "ask again", LoadPhase.FOUND),
        ({LoadPhase.PROMISED}, "allocate", LoadPhase.LOADING),
        ({LoadPhase.LOADING}, "load", LoadPhase.LOADED),
        ({LoadPhase.LOADING}, "fail", LoadPhase.FAILED),
    ]
)


@dataclass(slots=True)
class Load:
    """A request with a valid token, from its arrival to its end."""

    transfer: KVTransfer
    request: Any
    asked_at_s: float
    """Arrival of the request, by `time.monotonic`."""
    phase: LoadPhase = LoadPhase.LOOKING
    lookup: Lookup | None = None
    """The question to the sidecar; None: not asked yet, or never."""
    found: Match = _NOT_FOUND
    """Answer of the look-up."""
    reason: str = ""
    """Reason for which the last question of vLLM was answered with no tokens."""
    device_tokens: int = 0
    """Block-aligned hit in the engine's own prefix cache, as last presented."""
    reported: bool = False
    """A report was sent, or a worker will send it."""
    is_uncarried: bool = False
    """Nothing of the request is saved either."""
    of_old_weights: bool = False
    """Tokens of it were computed before the weights were given up for changed."""
    adapter: Adapter | None = None
    """LoRA adapter, once its digest is known."""
    is_named: bool = True
    """Whether the facts that name its KV are known: those of the ranks, of the weights and of its adapter."""
    named_by_ms: int = 0
    """Deadline of the wait for them, from the first question of vLLM on; 0: it has not asked yet."""
    counts_from_step: int = 0
    """Number of the step from which its computed tokens count: until then another connector may fail to load them."""

    def move(self, event: str) -> None:
        """Change the phase."""
        self.phase = PHASES.after(self.phase, event)

    def give_up(self, reason: str) -> None:
        """Load nothing for this request."""
        if self.lookup is not None:
            self.lookup.end()
        self.move("give up")
        self.reason = reason

    def forget_saved(self) -> None:
        """Start from nothing that was saved so far."""
        self.found = _NOT_FOUND
        if self.lookup is not None and PHASES.allows(self.phase, "give up"):
            self.give_up(_WEIGHTS_CHANGED)
        # Preempted requests are computed again, from their first token.
        self.of_old_weights = self.of_old_weights or self.request.num_computed_tokens > 0


class SchedulerSide:
    """All methods are called by the engine's thread and return at once, `shutdown` excepted.

    `match` and `idle_wait_s` take a moment while there is nothing to compute (spin.py).
    """

    def __init__(
        self,
        vllm_config: Any,
        settings: ConnectorSettings,
        secret: bytes,
        connect: Connect,
        *,
        clock: Clock,
        reads_unheld: bool,
    ) -> None:
        """`reads_unheld`: whether the worker may copy blocks that the engine does not hold for it.

        It may where it hears in time when they are reused.
        """
        device = str(vllm_config.device_config.device_type)
        self._mixes_adapters = are_mixed_up(vllm_config)
        self._reads_unheld = reads_unheld
        self._settings = settings
        self._secret = secret
        self._clock = clock
        self.counters = Counters()
        self._tracer = connector_tracer(settings, self.counters)
        self.identity = EngineIdentity()
        self._ranks: dict[int, RankFacts] = {}
        self._world_size = int(vllm_config.parallel_config.world_size)
        self._num_steps = 0
        self._question, self._asked = 0, 0
        """Numbers of the question of the last reset to the workers, and of the last one that they were asked."""
        self._asks_weights = False
        self._weights: dict[int, int] = {}
        """Answers of ranks: see WeightsWord."""
        self._left_alone = ""
        """Why nothing of this engine is saved or loaded, as a short fixed phrase; empty: something may be."""
        self._requests: dict[str, Load] = {}
        self._without_arena: set[int] = set()
        """Ranks without the sidecar's memory."""
        self._admitted: dict[str, Load] = {}
        """Requests that have engine blocks, and that no step has computed since."""
        self._loads: list[LoadPlan] = []
        self._saves: list[SavePlan] = []
        self.idle = IdleEngine(may_wait=is_alone(vllm_config))
        self._running = RunningSaves(sends_ahead=settings.sends_ahead(device))
        self.adapters = KnownAdapters()
        # A CPU engine computes a few tokens in that time: there all of a context's are loaded.
        self._estimate = LoadEstimate(always_ms=settings.load_always_ms, soon_ms=0 if device == "cpu" else SOON_MS)
        self._pending_saves = PendingSaves(self._clock, life_ms=settings.save_deadline_ms)
        self._saved_again = PendingSaves(self._clock, life_ms=settings.save_deadline_ms)
        """Lost KV that a turn without a commit has brought back, or tried to, not long ago."""
        self._sidecar = connect(settings.manifest_deadline_ms / 1000)
        self._reporter = Reporter(self._sidecar, self.counters, queue_limit=settings.queue_limit)
        self._lookup = Lookups(
            settings=settings,
            sidecar=self._sidecar,
            saves=self._pending_saves,
            counters=self.counters,
            clock=self._clock,
            tracer=self._tracer,
        )

    def leave_alone(self, reason: str, text: str) -> None:
        """Save and load nothing from now on, and say why, once. The engine serves as if we were not there."""
        if self._left_alone:
            return
        self._left_alone = reason
        self.counters.add("left_alone", reason)
        log.warning("KV of this engine is not saved or loaded", extra={"reason": reason, "why": text})

    def learn_ranks(self, ranks: Sequence[RankFacts]) -> None:
        """Take facts of workers. When they differ, nothing is loaded or saved."""
        self._ranks |= {rank.rank: rank for rank in ranks}
        if not ranks or len(self._ranks) < self._world_size:
            return
        if not self.identity.learn(self._ranks.values()):
            self.leave_alone("ranks_differ", "ranks have different fingerprints: their weights or settings differ")
        elif not self.identity.are_weights_known:
            self.counters.add("unknown_weights")
            log.warning("weights unknown, their KV will not outlive this engine")

    def take_question(self) -> int:
        """Return the number of a question for the workers, once: whether the weights are those before the sleep."""
        if not self._asks_weights or self._asked == self._question:
            return 0
        self._asked = self._question
        return self._question

    def learn_weights(self, words: Iterable[WeightsWord]) -> None:
        """Take the workers' answers. When all have slept as often as the engine was reset, stored KV is used again."""
        for word in words:
            if word.number == self._question:
                self._weights[word.rank] = word.num_sleeps
        if self.identity.is_in_doubt and len(self._weights) == self._world_size:
            numbers = set(self._weights.values())
            self.identity.settle(numbers.pop() if len(numbers) == 1 else 0)

    def learn_arenas(self, words: Iterable[ArenaWord]) -> None:
        """Take the workers' word on the sidecar's memory. Without it on every rank, nothing is promised."""
        for word in words:
            (self._without_arena.add if word.lacks_arena else self._without_arena.discard)(word.rank)

    def reset(self) -> bool:
        """Load nothing that was saved before. The sidecar keeps it until it expires.

        Called when the engine is told to forget: weights may change. Returns False while a load is under way.
        """
        self.identity.move()
        self._question, self._asks_weights, self._weights = self._question + 1, False, {}
        self._pending_saves.clear()
        self._saved_again.clear()
        self.counters.add("forgotten")
        log.info("saved KV no longer used: the engine was told to forget")
        for request_id, load in self._requests.items():
            load.forget_saved()
            self._running.end(request_id)
        return all(load.phase is not LoadPhase.LOADING for load in self._requests.values())

    @property
    def _facts(self) -> RankFacts | None:
        return None if self._left_alone else self.identity.facts

    def begin(self, request: Any) -> None:
        """Look at a new request, and start its lookup before it is scheduled. Harmless when repeated."""
        if request.request_id in self._requests:
            return
        self.idle.ready.add(request.request_id)
        if request.lora_request is not None:
            self.adapters.observe(request.lora_request)
        transfer = self._verified(request)
        if transfer is None:
            return
        load = self._requests[request.request_id] = Load(transfer, request, time.monotonic())
        if self._left_alone:
            load.give_up(self._left_alone)
        elif request.mm_features:
            # Token ids alone do not identify the KV.
            self._leave_out(load, "multimodal")
        elif request.prompt_embeds is not None:
            self._leave_out(load, "prompt_embeds")
        elif request.lora_request is None and self._mixes_adapters:
            self._leave_out(load, "adapters_mixed_up")
        else:
            load.is_named = False
            self._awaits_name(load)

    def _start(self, load: Load, facts: RankFacts) -> None:
        """Look for stored KV, and watch the computation. `facts` are also the adapter's."""
        request, transfer = load.request, load.transfer
        if self._reads_unheld:
            self._running.watch(request, transfer, facts)
        may_match = self._settings.match_prefix and request.num_prompt_tokens > self._settings.match_tokens_min
        if request.skip_reading_prefix_cache or not (transfer.load or may_match):
            load.give_up("prefix_cache_reading_off")
            return
        rate = self._estimate.compute_us_per_token
        load.lookup = self._lookup.start(transfer, request.prompt_token_ids, facts, rate)
        self.idle.ready.discard(request.request_id)

    def _awaits_name(self, load: Load) -> bool:
        """Look for stored KV once it has a name, or cannot be named in time; True: not yet."""
        if load.is_named:
            return False
        found = self._facts_of(load)
        if found is None and (not load.named_by_ms or self._clock.now_ms() < load.named_by_ms):
            return True
        load.is_named = True
        if isinstance(found, RankFacts):
            self._start(load, found)
        else:
            self.identity.settle(0)
            # KV computed from the first token may still be saved: its name is known at the end.
            load.give_up(found or (_RANKS_UNKNOWN if self._facts is None else UNKNOWN))
        return False

    def _facts_of(self, load: Load) -> RankFacts | str | None:
        """Return the facts that name a request's KV, or why there are none, or None: the workers have been asked."""
        facts, lora_request = self._facts, load.request.lora_request
        if facts is not None and self.identity.is_in_doubt:
            return None
        if facts is None or lora_request is None:
            return facts or self._left_alone or None
        found = self.adapters.find(lora_request, facts.world_size)
        if not isinstance(found, Adapter):
            return found
        load.adapter = found
        return replace(facts, fingerprint=found.key(facts.fingerprint))

    def _leave_out(self, load: Load, reason: str) -> None:
        """Neither save nor load anything of a request."""
        load.is_uncarried = True
        if PHASES.allows(load.phase, "give up"):
            load.give_up(reason)
        self.counters.add("unsupported_requests", reason)
        self._abandon(load.request, load.transfer, reason)

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens to load beyond `num_computed_tokens`, True), (0, False), or (None, False): ask again.

        vLLM may ask any number of times. Only this request's record changes.
        """
        self.begin(request)
        load = self._requests.get(request.request_id)
        if load is None:
            return 0, False
        if not load.is_named and not load.named_by_ms:
            load.named_by_ms = self._clock.now_ms() + self._settings.manifest_deadline_ms
        # Only now: a paused engine takes requests, and its weights may change until it goes on.
        self._asks_weights = self._asks_weights or self.identity.is_in_doubt
        if self._awaits_name(load):
            return None, False
        load.device_tokens = num_computed_tokens
        if load.lookup is None or load.phase in (LoadPhase.NOTHING, LoadPhase.FAILED):
            return 0, False
        load.lookup.device_tokens = num_computed_tokens
        if load.phase in (LoadPhase.PROMISED, LoadPhase.LOADED):
            load.move("ask again")
        if self._without_arena:
            load.give_up("no_arena")
            return 0, False
        if load.phase is LoadPhase.LOOKING and self._needs_no_answer(load):
            load.reason = COMPUTED_SOON
        elif load.phase is LoadPhase.LOOKING and not self._look(load, load.lookup):
            return None, False
        num_tokens = self._worth_loading(load) if load.phase is LoadPhase.FOUND else 0
        if num_tokens:
            load.move("promise")
        return num_tokens, num_tokens > 0

    def _look(self, load: Load, lookup: Lookup) -> bool:
        """Take the answer of a look-up, if it has come."""
        if not self._saves:  # a step that also hands over saves is not held
            self.idle.wait_for(lookup, load.asked_at_s)
        found = lookup.result(self._clock.now_ms())
        if found is None:
            return False
        load.found = found
        if found.manifest is None:
            load.give_up(found.reason)
        else:
            self._pending_saves.end(found.manifest.cache_ref)
            load.move("find")
        return True

    def _needs_no_answer(self, load: Load) -> bool:
        """Return whether the tokens that a look-up could bring are computed before a load could end.

        These are the rest of the prompt. Of a context that is being saved here they are the rest of that: the next turn
        often comes before the seal, which it would wait for. Kept KV lives on by being found, and lost KV may come back
        with this request: those wait.
        """
        transfer, rest = load.transfer, load.request.num_tokens - 1 - load.device_tokens
        saved_tokens = self._pending_saves.num_tokens(transfer.load[0]) if transfer.load else 0
        if saved_tokens >= load.device_tokens:  # more on the device is another context's, which may bring more yet
            rest = min(rest, saved_tokens - load.device_tokens)
        if not load.device_tokens or not self._estimate.is_soon(rest):
            return False
        assert load.lookup is not None, "the look-up is in flight"
        is_over = load.lookup.result(self._clock.now_ms()) is not None
        return not (is_over or transfer.is_kept or transfer.save_again_tokens)

    def _worth_loading(self, load: Load) -> int:
        """Return how many tokens beyond the engine's own are to be loaded of a manifest; 0: none, for `load.reason`."""
        found, load.reason = load.found, ""
        if found.manifest is None or self._facts is None:
            return 0
        # The last token is always computed, to have something to sample from. A promise to load it too makes vLLM
        # step back by one, and a prompt of one token would be asked about for ever.
        # Where a group has a window it would be wrong too: vLLM has let go of the block that the last token sees.
        most = restorable_tokens(found.manifest, min(found.num_tokens, load.request.num_tokens - 1))
        num_tokens = most - load.device_tokens
        if num_tokens < 1:
            return 0
        block_tokens = max(group.block_tokens for group in self._facts.groups)
        if load.device_tokens and num_tokens < block_tokens and self._estimate.is_soon(num_tokens):
            load.reason = COMPUTED_SOON
            return 0
        if self._estimate.is_slower(num_tokens, _size_bytes(found.manifest, num_tokens), found.tier):
            load.give_up(_SLOWER)
            return 0
        return num_tokens

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """Plan the load the engine made room for, or report why there is none.

        Another connector may load instead. Then `num_external_tokens` is 0 too.
        """
        self.idle.ready.add(request.request_id)
        load = self._requests.get(request.request_id)
        if load is None:
            return
        self._admitted[request.request_id] = load
        if num_external_tokens == 0:
            self._report_no_load(load)
            return
        load.move("allocate")
        found = load.found
        assert self._facts is not None, "tokens were promised by a known rank"
        assert found.manifest is not None, "tokens were promised from a manifest"
        facts, manifest = self._facts, found.manifest
        plan = LoadPlan(
            engine_request_id=request.request_id,
            # A preempted request loads again, but its prompt's receipt is already written.
            request_id="" if load.reported else load.transfer.request_id,
            tenant=manifest.tenant,
            cache_ref=manifest.cache_ref,
            fingerprint=manifest.fingerprint,
            digests=tuple(group.digest for group in facts.groups),
            pieces=load_pieces(manifest, facts, block_ids, load.device_tokens, num_external_tokens),
            device_tokens=load.device_tokens,
            loaded_tokens=num_external_tokens,
            asked_at_s=load.asked_at_s,
            traceparent=load.transfer.traceparent,
            adapter=load.adapter,
            compute_us_per_token=self._estimate.compute_us_per_token,
        )
        load.reported = True
        size_bytes = _size_bytes(found.manifest, num_external_tokens)
        self._estimate.begin(request.request_id, size_bytes, found.tier, self._clock.now_ms())
        self._loads.append(plan)

    def tier_of(self, request: Any) -> pb.Tier.ValueType:
        """Return the tier a request's load was promised from."""
        load = self._requests.get(request.request_id)
        return pb.TIER_UNSPECIFIED if load is None else load.found.tier

    def take_plans(self, scheduler_output: Any) -> tuple[tuple[LoadPlan, ...], tuple[SavePlan, ...], tuple[str, ...]]:
        """Return this step's work: loads, saves, and the saves whose blocks it may compute into."""
        self._note_admitted(scheduler_output.num_scheduled_tokens)
        for plan in self._running.observe(scheduler_output, self._facts, self._counts):
            if plan.early or self._pending_saves.add(plan.cache_ref):
                self._saves.append(_with_adapter(plan, self._requests[plan.engine_request_id].adapter))
        scheduled = scheduler_output.num_scheduled_tokens
        in_prompts = sum(count for count in scheduled.values() if count > _DECODED_TOKENS)
        self._estimate.step(in_prompts, self._clock.now_ms(), scheduled)
        self.idle.step(has_work=bool(scheduler_output.total_num_scheduled_tokens or self._loads))
        loads, saves = tuple(self._loads), tuple(self._saves)
        self._loads, self._saves = [], []
        return loads, saves, self._running.take_overtaken()

    def idle_wait_s(self) -> float:
        """Return how long the workers may wait in this step, see `IdleEngine.wait_s`."""
        loads = self._requests.values()
        is_loading = any(load.phase is LoadPhase.LOADING for load in loads)
        return self.idle.wait_s((load.lookup for load in loads), is_loading=is_loading)

    def _note_admitted(self, scheduled: Mapping[str, int]) -> None:
        """Note the requests whose first tokens another connector loads in this step.

        Their step may fail, and the next one is planned before that is known.
        """
        self._num_steps += 1
        for request_id in self._admitted.keys() & scheduled:
            load = self._admitted.pop(request_id)
            is_loaded_here = load.phase is LoadPhase.LOADED or load.request.num_computed_tokens <= load.device_tokens
            load.counts_from_step = 0 if is_loaded_here else self._num_steps + 2

    def _counts(self, request_id: str) -> bool:
        """Return whether the blocks of a request hold the KV of the tokens that vLLM counts as computed."""
        load = self._requests.get(request_id)
        return load is not None and request_id not in self._admitted and self._num_steps >= load.counts_from_step

    def loads_ended(self, received: Iterable[str], failed: Iterable[str]) -> None:
        """Take the engine request ids of loads that ended, from the workers."""
        failed_ids = set(failed)
        for request_id in set(received) | failed_ids:
            is_loaded = request_id not in failed_ids
            self._estimate.end(request_id, self._clock.now_ms(), is_loaded=is_loaded)
            load = self._requests.get(request_id)
            if load is not None and load.phase is LoadPhase.LOADING:
                load.move("load" if is_loaded else "fail")

    def saves_ended(self, cache_refs: Iterable[str]) -> None:
        """Take the workers' word on saves that are sealed or given up."""
        for cache_ref in cache_refs:
            self._pending_saves.end(cache_ref)
            self._running.ended(cache_ref)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> bool:
        """Plan the save of a finished request; True: its blocks must be kept until the worker lets go.

        Called for every end, aborts included: a stop string ends as an abort. A prompt of which only a part was
        computed is saved as far: a retry finds it. The last token never has KV.
        """
        load = self._requests.get(request.request_id)
        self.idle.ready.discard(request.request_id)
        self._estimate.end(request.request_id, self._clock.now_ms(), is_loaded=False)
        if load is None:
            return False
        # A step that ends a request has not failed.
        counts = self._counts(request.request_id) or request.status is not RequestStatus.FINISHED_ABORTED
        self._admitted.pop(request.request_id, None)
        del self._requests[request.request_id]
        if load.lookup is not None:
            load.lookup.end()
        plan = self._save_plan(request, load, block_ids, counts=counts)
        self._running.end(request.request_id, is_held=plan is not None)
        if plan is None:
            return False
        self._saves.append(plan)
        return True

    def shutdown(self) -> None:
        """End the threads and the channel, within the deadline."""
        ends_at_s = time.monotonic() + self._settings.shutdown_deadline_ms / 1000
        self._sidecar.close()
        ended = [pool.close(max(ends_at_s - time.monotonic(), 0)) for pool in (self._lookup, self._reporter)]
        if not all(ended):
            log.warning("lookup threads still running at shutdown")
        self._tracer.close()

    def _verified(self, request: Any) -> KVTransfer | None:
        """Return the turn's signed order, or None: no token, or a forged one."""
        params = request.kv_transfer_params
        token = params.get(KV_TRANSFER_KEY) if isinstance(params, dict) else None
        if not isinstance(token, str):
            return None
        try:
            return verify_kv_transfer(token, self._secret)
        except ForgedIdentity:
            self.counters.add("forged_tokens")
            log.warning("kv-transfer token refused")
            return None

    def _report_no_load(self, load: Load) -> None:
        """Report once a request; never after preemption, whose re-admission says nothing about the prompt."""
        is_asked = load.transfer.load or load.transfer.is_kept or load.device_tokens
        if load.reported or load.request.num_preemptions or not is_asked:
            return
        load.reported = True
        missed = load.phase is LoadPhase.NOTHING
        self.counters.add("missed_loads" if missed else "unneeded_loads", load.reason)
        self._reporter.send(
            pb.LoadReport(
                request_id=load.transfer.request_id,
                outcome=pb.LOAD_OUTCOME_MISS if missed else pb.LOAD_OUTCOME_NOT_NEEDED,
                device_tokens=load.device_tokens,
                restore_ms=(time.monotonic() - load.asked_at_s) * 1000,
                reason=load.reason,
                compute_us_per_token=self._estimate.compute_us_per_token,
            )
        )

    def _save_plan(
        self, request: Any, load: Load, block_ids: Sequence[Sequence[int]], *, counts: bool
    ) -> SavePlan | None:
        again = self._lost_ref(load)
        cache_ref, facts = load.transfer.save or again, self._facts
        if facts is None:
            self._abandon(request, load.transfer, self._left_alone or _RANKS_UNKNOWN)
        if cache_ref is None or facts is None or load.is_uncarried:
            return None
        if load.adapter is None and request.lora_request is not None:
            found = self.adapters.find(request.lora_request, facts.world_size)
            if not isinstance(found, Adapter):
                self._leave_out(load, found or UNKNOWN)
                return None
            load.adapter = found
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1) if counts else 0
        if again is not None:
            num_tokens = min(num_tokens, load.transfer.save_again_tokens)
        if load.transfer.is_kept and num_tokens < self._settings.match_tokens_min:
            return None  # nothing would ever be loaded from it
        # Less of a prompt is never found. Lost KV comes back whole, because its name stands for all of it.
        least = request.num_prompt_tokens if again else min(request.num_prompt_tokens, self._settings.match_tokens_min)
        if obstacle := _obstacle(load, facts, num_tokens, block_ids, least=least):
            self.counters.add("skipped_saves", obstacle)
            self._abandon(request, load.transfer, obstacle)
            return None
        if not self._pending_saves.add(cache_ref, num_tokens):
            self.counters.add("skipped_saves", "twice")
            return None
        if again is not None:
            self._saved_again.add(again)
            self.counters.add("lost_contexts")
        plan = save_plan(
            request,
            load.transfer,
            facts,
            kept_blocks(facts.groups, block_ids, num_tokens),
            cache_ref=cache_ref,
            tokens=slice(self._running.planned_tokens(request.request_id), num_tokens),
        )
        return _with_adapter(plan, load.adapter)

    def _abandon(self, request: Any, transfer: KVTransfer, reason: str) -> None:
        """Have the sidecar know that a request that was to be saved is not, and why."""
        if transfer.save is not None:
            self._reporter.abandon_save(transfer.tenant, transfer.save, reason, started_at_ms=started_at_ms(request))

    def _lost_ref(self, load: Load) -> CacheRef | None:
        """Return the name of KV that is gone and that only this request brings back; None: there is none."""
        transfer, found = load.transfer, load.found
        if transfer.save is not None or transfer.save_again_tokens < 1 or not transfer.load:
            return None
        first = transfer.load[0]
        # Turns like this one run in parallel; all have missed it, one brings it back.
        return first if first in found.missing and first not in self._saved_again else None


def _with_adapter(plan: SavePlan, adapter: Adapter | None) -> SavePlan:
    return plan if adapter is None else replace(plan, fingerprint=adapter.key(plan.fingerprint), adapter=adapter)


def _size_bytes(manifest: Manifest, num_tokens: int) -> int:
    """Return about how many bytes so many of a context's tokens have."""
    return manifest.size_bytes * num_tokens // max(len(manifest.token_ids), 1)


def _obstacle(load: Load, facts: RankFacts, num_tokens: int, block_ids: Sequence[Sequence[int]], *, least: int) -> str:
    """Return why a finished request cannot be saved, as a short fixed phrase; empty: it can.

    `least`: tokens that it must have computed.
    """
    request = load.request
    if load.of_old_weights:
        return _WEIGHTS_CHANGED
    if num_tokens < 1 or request.num_computed_tokens < least:
        return "not_computed"
    if len(block_ids) != len(facts.groups):
        return "blocks_gone"
    for group, ids in zip(facts.groups, block_ids, strict=True):
        if len(ids) < group.num_positions(num_tokens):
            return "blocks_gone"
        # A state is of exactly the tokens that were computed, and a step may be in flight when a request is stopped.
        if group.kind == "state" and request.num_computed_tokens != num_tokens:
            return "state_ahead"
    return "null_block" if any(NULL_BLOCK in ids for ids in kept_blocks(facts.groups, block_ids, num_tokens)) else ""
