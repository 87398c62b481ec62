"""A rank of an engine without the engine: the worker's half of the connector over paged tensors of its own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    # vLLM and torch warn about themselves while they are imported; from here on warnings are errors again.
    warnings.simplefilter("ignore")
    import torch
    import torch._inductor.compile_fx  # imported by vLLM at a moment of its choosing
    import vllm.v1.core.sched.scheduler  # noqa: F401  # brings in everything else

from contextcache.model import Manifest
from kv_sidecar.client import EngineSidecarClient, open_arena, pack_token_ids
from tests.kit.patience import CONNECTOR
from tests.kit.sidecar_process import SidecarProcess, fault
from tests.kit.until import wait_until
from vllm_plugin.connector.engine_check import LayerGroup
from vllm_plugin.connector.metadata import LoadPlan, RankFacts, SavePlan, load_pieces
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Connect, MonotonicClock, OpenArena
from vllm_plugin.connector.transfer import Results
from vllm_plugin.connector.worker_side import WorkerSide

BLOCK_TOKENS, ENGINE_BLOCK_TOKENS, NUM_BLOCKS = 64, 16, 192

BLOCK_BYTES = 3 * BLOCK_TOKENS * 2 * 8 * 4
"""Three layers of float32, two heads, eight values."""
HEAD_BYTES = 2_000
ONE_GROUP = (LayerGroup("full_attention", ENGINE_BLOCK_TOKENS, 0, ("l0", "l1", "l2")),)


@dataclass
class Door:
    """A way to a sidecar."""

    connect: Connect
    open_arena: OpenArena


def door_of(process: SidecarProcess) -> Door:
    return Door(
        lambda timeout_s: EngineSidecarClient(process.address, timeout_s=timeout_s),
        partial(open_arena, process.address),
    )


class Rank:
    """One worker's half with random KV."""

    def __init__(
        self,
        door: Door,
        rank: int = 0,
        world_size: int = 1,
        *,
        model: str = "m",
        groups: Sequence[LayerGroup] = ONE_GROUP,
        **settings_of: Any,
    ) -> None:
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                model=model,
                revision=None,
                quantization=None,
                dtype="float32",
                max_model_len=4096,
                hf_config=SimpleNamespace(to_dict=dict),
            ),
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=ENGINE_BLOCK_TOKENS),
            parallel_config=SimpleNamespace(
                rank=rank, world_size=world_size, tensor_parallel_size=world_size, pipeline_parallel_size=1
            ),
            compilation_config=SimpleNamespace(static_forward_context={}),
            load_config=SimpleNamespace(load_format="dummy"),
            lora_config=None,
            speculative_config=None,
        )
        settings = ConnectorSettings(sidecar="", secret_file="", **{**CONNECTOR, **settings_of})
        self.side = WorkerSide(
            config, NUM_BLOCKS, groups, settings, door.connect, door.open_arena, clock=MonotonicClock()
        )
        self.kv = {f"l{i}": torch.rand(NUM_BLOCKS, 2, ENGINE_BLOCK_TOKENS, 8) for i in range(3)}
        self.side.register_kv_caches(self.kv)

    def run(self, *, load: LoadPlan | None = None, save: SavePlan | None = None) -> Results:
        """Carry a plan out and return all its results."""
        self.side.start([load] if load else [], [save] if save else [])
        results = Results()

        def is_done() -> bool:
            new = self.side.take_results()
            for name in ("sent", "received", "failed", "ended_saves"):
                getattr(results, name).update(getattr(new, name))
            return bool(results.received) if load else bool(results.sent)

        wait_until(is_done, what="the plan is carried out", deadline_s=90)
        return results

    def manifest(self, cache_ref: str) -> Manifest:
        found: list[Manifest] = []
        client = self.side._sidecar
        wait_until(
            lambda: fault(lambda: found.append(client.get_manifest("demo", cache_ref, 1)[0])) is None,
            what="there is a manifest",
            deadline_s=90,
        )
        return found[0]


def save_plan(rank: Rank, cache_ref: str, num_tokens: int, block_ids: list[int]) -> SavePlan:
    assert rank.side.facts is not None
    return SavePlan(
        engine_request_id=f"engine-{cache_ref}",
        tenant="demo",
        session_id="ctx_1",
        cache_ref=cache_ref,
        expires_at_ms=2_000_000_000_000,
        started_at_ms=1_000,
        first_token=0,
        token_ids=pack_token_ids(range(num_tokens)),
        groups=rank.side.facts.groups,
        block_ids=(tuple(block_ids),),
        fingerprint=rank.side.facts.fingerprint,
    )


def load_plan(rank: Rank, manifest: Manifest, *block_ids: list[int], device_tokens: int = 0) -> LoadPlan:
    assert rank.side.facts is not None
    return plan_of(manifest, rank.side.facts, block_ids, device_tokens, len(manifest.token_ids) - device_tokens)


def plan_of(
    manifest: Manifest,
    facts: RankFacts,
    block_ids: Sequence[Sequence[int]],
    device_tokens: int,
    loaded_tokens: int,
) -> LoadPlan:
    """Return a plan as the scheduler makes it."""
    return LoadPlan(
        engine_request_id="engine-load",
        request_id=f"request-{manifest.cache_ref}",
        tenant=manifest.tenant,
        cache_ref=manifest.cache_ref,
        fingerprint=manifest.fingerprint,
        digests=tuple(group.digest for group in facts.groups),
        pieces=load_pieces(manifest, facts, block_ids, device_tokens, loaded_tokens),
        device_tokens=device_tokens,
        loaded_tokens=loaded_tokens,
        asked_at_s=0,
    )
