"""vLLM's ExampleConnector, which reports failed loads while a file named `fail` is in its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class SecondConnector(ExampleConnector):  # type: ignore[misc]  # vLLM is not followed by mypy
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._invalid: set[int] = set()

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if Path(self._storage_path, "fail").exists():
            loads = [request for request in metadata.requests if not request.is_store]
            metadata.requests = [request for request in metadata.requests if request.is_store]
            self._invalid |= {int(slot) // self._block_size for load in loads for slot in load.slot_mapping}
        super().start_load_kv(forward_context, **kwargs)

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid
