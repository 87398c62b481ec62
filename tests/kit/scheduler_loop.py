"""vLLM's real Scheduler and our real connector, both halves, around a toy model: no weights, no server.

The toy model writes into the paged KV of each scheduled token a value made of layer, position and token id, and
before each step checks that every earlier position of the request holds what it must. So a page that was loaded
into the wrong block, cut at the wrong token, or overwritten by somebody else fails the step that would read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16
HEADS, HEAD_DIM = 2, 4
LAYERS = ("l0", "l1")


@dataclass
class LoopConfig:
    model_directory: Path
    connector: str
    """`module:Class`."""
    extra: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 200
    max_num_batched_tokens: int = 256
    policy: str = "recompute"
    windows: tuple[int, ...] = (0,)
    """Of each group of layers: tokens that a token sees, 0: all before it."""


def make_vllm_config(config: LoopConfig) -> VllmConfig:
    module, _, name = config.connector.partition(":")
    model = ModelConfig(model=str(config.model_directory), skip_tokenizer_init=True, dtype="float32", seed=0)
    cache = CacheConfig(block_size=BLOCK_TOKENS, gpu_memory_utilization=0.3, enable_prefix_caching=True)
    cache.num_gpu_blocks = config.num_blocks
    scheduler = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=1024,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        disable_hybrid_kv_cache_manager=len(config.windows) == 1 and not config.windows[0],
    )
    transfer = KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_load_failure_policy=config.policy,
        kv_connector_extra_config=config.extra,
    )
    return VllmConfig(
        scheduler_config=scheduler,
        model_config=model,
        cache_config=cache,
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
    )


def make_kv_cache_config(num_blocks: int, windows: tuple[int, ...]) -> KVCacheConfig:
    sizes: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": HEADS,
        "head_size": HEAD_DIM,
        "dtype": torch.float32,
    }
    specs = [
        SlidingWindowSpec(**sizes, sliding_window=window) if window else FullAttentionSpec(**sizes)
        for window in windows
    ]
    groups = [KVCacheGroupSpec(names_of(number), spec) for number, spec in enumerate(specs)]
    page_bytes = specs[0].page_size_bytes
    names = [name for group in groups for name in group.layer_names]
    tensor = KVCacheTensor(
        size=page_bytes * num_blocks * len(names),
        layers=names,
        layer_stride=page_bytes * num_blocks,
        block_stride=page_bytes,
    )
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups, hash_block_size=BLOCK_TOKENS
    )


def names_of(group: int) -> list[str]:
    """Return the names of a group's layers."""
    return list(LAYERS) if group == 0 else [f"g{group}.{name}" for name in LAYERS]


class SchedulerLoop:
    """One engine: call `step` until what you wait for has happened."""

    def __init__(self, config: LoopConfig) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.vllm_config = make_vllm_config(config)
        kv_cache_config = make_kv_cache_config(config.num_blocks, config.windows)
        self._windows = config.windows
        self.scheduler = Scheduler(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_cache_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self.connector = self.scheduler.connector
        with set_current_vllm_config(self.vllm_config):  # as vLLM does in workers, and nowhere else
            self.worker = type(self.connector)(self.vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self.kv: dict[str, torch.Tensor] = {}
        for name in LAYERS:
            # Layers of different groups lie over each other, as vLLM lays them.
            memory = torch.zeros(config.num_blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM, dtype=torch.float32)
            for group in range(len(config.windows)):
                self.kv[names_of(group)[LAYERS.index(name)]] = memory
        self.worker.register_kv_caches(self.kv)
        self.hear_worker()
        self._invalid: set[int] = set()
        """Blocks that another connector failed to load in this step: vLLM computes them again."""
        self.finished: dict[str, list[int]] = {}
        """Output token ids of finished requests."""
        self.outputs: dict[str, list[int]] = {}
        self.adapters: dict[int, ToyAdapter] = {}
        """What the toy engine has in memory for LoRA adapters, by their number."""
        self.computed: dict[str, int] = {}
        """Tokens the toy model computed, by request."""

    def hear_worker(self) -> None:
        """Hand the worker's news to the scheduler, as the first step does."""
        news = self.worker.build_connector_worker_meta()
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=news))

    def close(self) -> None:
        self.connector.shutdown()
        self.worker.shutdown()

    def add(
        self,
        request_id: str,
        token_ids: Iterable[int],
        *,
        max_tokens: int = 4,
        params: Any = None,
        skip_reading: bool | None = None,
        adapter: LoRARequest | None = None,
    ) -> Request:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
            skip_reading_prefix_cache=skip_reading,
        )
        sampling.update_from_generation_config({}, None)
        request = Request(request_id, list(token_ids), sampling, None, lora_request=adapter, block_hasher=self._hasher)
        self.outputs[request_id] = []
        self.computed[request_id] = 0
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Schedule, compute, let the worker's half do its part, and hand the results back."""
        output = self.scheduler.schedule()
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        for name in output.num_scheduled_tokens:
            if (adapter := self.scheduler.requests[name].lora_request) is not None:
                self.worker.worker_side.adapters.seen(adapter, self.adapters[adapter.lora_int_id])
        if output.has_sync_kv_loads:
            self.worker.start_load_kv(None, scheduler_output=output)
        self._invalid = self.worker.get_block_ids_with_load_errors()
        sampled = [self._forward(name, count) for name, count in output.num_scheduled_tokens.items()]
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(None, scheduler_output=output)
        results = self.worker.get_transfer_results(output.finished_req_ids)
        kv_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self._invalid,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        answers = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=kv_output,
            ),
        )
        for group in answers.values():
            for answer in group.outputs:
                self.outputs[answer.request_id] += answer.new_token_ids
                if answer.finish_reason is not None:
                    self.finished[answer.request_id] = self.outputs[answer.request_id]
        return output

    def run(self, until: Callable[[], bool], *, steps: int = 200) -> None:
        """Step until a condition holds, letting the connector's threads finish between steps."""
        for _ in range(steps):
            if until():
                return
            self.step()
            self.settle()
        raise AssertionError("the condition did not come true")

    def run_to_end(self, request_id: str) -> list[int]:
        """Step until a request has finished and nothing is held; return its output."""
        self.run(lambda: request_id in self.finished and not self.scheduler.has_requests())
        return self.finished[request_id]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def play(self, request_id: str, token_ids: Iterable[int], **more: Any) -> list[int]:
        """Add a request and run it to its end; return its output."""
        self.add(request_id, token_ids, **more)
        return self.run_to_end(request_id)

    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until no thread of the connector has work left."""
        for pool in self._pools():
            while live := list(pool._live):
                assert not wait(live, timeout_s).not_done, "a transfer thread hangs"

    def _pools(self) -> list[Any]:
        worker, scheduler = ours(self.worker).worker_side, ours(self.connector).scheduler_side
        return [
            scheduler._lookup._pool,
            worker._load_pool,
            worker._save_pool,
            worker._upload_pool,
            worker._reporter._pool,
            worker.adapters._pool,
            scheduler._reporter._pool,
        ]

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def blocks_of(self, request_id: str, group: int = 0) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[group])

    def forget_prefixes(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()
        for tensor in self.kv.values():
            tensor.fill_(-1)

    def _forward(self, request_id: str, count: int) -> list[int]:
        request = self.scheduler.requests[request_id]
        end = request.num_computed_tokens
        tables = [self.blocks_of(request_id, group) for group in range(len(self._windows))]
        for group, (window, block_ids) in enumerate(zip(self._windows, tables, strict=True)):
            first = max(0, end - count - window + 1) if window else 0
            for position in range(first, end - count):
                if block_ids[position // BLOCK_TOKENS] in self._invalid:
                    continue
                for held, expected in self._places(request, group, block_ids, position):
                    assert bool((held == expected).all()), f"wrong KV at {position} of {request_id}, group {group}"
        for group, block_ids in enumerate(tables):
            for position in range(end - count, end):
                for place, value in self._places(request, group, block_ids, position):
                    place.fill_(value)
        self.computed[request_id] += count
        return [] if end < request.num_tokens else [(request.all_token_ids[end - 1] * 7 + end) % 500]

    def _places(
        self, request: Request, group: int, block_ids: list[int], position: int
    ) -> Iterator[tuple[torch.Tensor, float]]:
        """Yield, for each layer of a group, where a position's KV lies and what must lie there."""
        block = block_ids[position // BLOCK_TOKENS]
        assert block, "a block that is none"
        for layer, name in enumerate(names_of(group)):
            value = _value(layer + 2 * group, position, request.all_token_ids[position])
            if request.lora_request is not None:
                value += self.adapters[request.lora_request.lora_int_id].shift
            yield self.kv[name][block, :, position % BLOCK_TOKENS], value


def ours(connector: Any) -> Any:
    """Return our connector, which may be one under a MultiConnector."""
    return next(each for each in getattr(connector, "sub_connectors", [connector]) if hasattr(each, "connect_sidecar"))


class ToyAdapter:
    """Moves what the toy model writes."""

    def __init__(self, shift: float) -> None:
        self.shift = shift


def _value(layer: int, position: int, token_id: int) -> float:
    return float((layer + 1) * 100_000 + position * 600 + token_id)
