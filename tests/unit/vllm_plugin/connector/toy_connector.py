"""Another connector, beside ours under vLLM's MultiConnector: keeps the KV of prompts in memory. Fails when told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

BLOCK_TOKENS = 16


@dataclass
class ToyMetadata(KVConnectorMetadata):
    loads: list[tuple[str, tuple[int, ...], list[int]]] = field(default_factory=list)
    """Request id, tokens and engine blocks."""


class ToyHandshake(KVConnectorHandshakeMetadata):
    pass


class PlainToyConnector(KVConnectorBase_V1):
    """Loads within the step, or asynchronously with `is_async`."""

    is_async: ClassVar[bool] = False
    fails: ClassVar[bool] = False
    is_held: ClassVar[bool] = False
    """Whether loads that have begun do not end."""
    stored: ClassVar[dict[tuple[int, ...], dict[str, Any]]] = {}
    kv: ClassVar[dict[str, Any]] = {}
    handshakes: ClassVar[list[Any]] = []
    num_loaded: ClassVar[int] = 0

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._found: dict[str, tuple[int, ...]] = {}
        self._metadata = ToyMetadata()
        self._received: list[str] = []
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    @override
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        PlainToyConnector.kv = kv_caches

    @override
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return ToyHandshake()

    @override
    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.handshakes.extend(metadata.values())

    @override
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        prompt = tuple(request.prompt_token_ids)
        sizes = range((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, num_computed_tokens, -BLOCK_TOKENS)
        found = next((prompt[:size] for size in sizes if prompt[:size] in self.stored), ())
        self._found[request.request_id] = found
        return (len(found) - num_computed_tokens, self.is_async) if found else (0, False)

    @override
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            found = self._found[request.request_id]
            block_ids = blocks.get_block_ids()[0][: len(found) // BLOCK_TOKENS]
            self._metadata.loads.append((request.request_id, found, block_ids))

    @override
    def build_connector_meta(self, scheduler_output: Any) -> ToyMetadata:
        metadata, self._metadata = self._metadata, ToyMetadata()
        return metadata

    @override
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        size = min(request.num_computed_tokens, len(request.prompt_token_ids)) // BLOCK_TOKENS
        held = block_ids[:size]
        key = tuple(request.prompt_token_ids[: size * BLOCK_TOKENS])
        self.stored[key] = {name: tensor[held].clone() for name, tensor in self.kv.items()}
        return False, None

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, found, block_ids in self._get_connector_metadata().loads:
            PlainToyConnector.num_loaded += len(found)
            for name, tensor in self.kv.items():
                tensor[block_ids] = -7 if self.fails or self.is_held else self.stored[found][name]
            if self.is_async:
                self._received.append(request_id)
                self._failed |= {request_id} if self.fails else set()
            elif self.fails:
                self._invalid |= set(block_ids)
            if self.fails:
                del self.stored[found]  # offered again, it would fail again

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if not self.is_held:
            results.finished_recving.update(self._received)
            results.failed_recving.update(self._failed)
            self._received, self._failed = [], set()
        return results

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    @override
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @override
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    @override
    def wait_for_save(self) -> None: ...


class ToyConnector(PlainToyConnector, SupportsHMA):
    """Supports hybrid memory too, as ours does."""

    @override
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])
