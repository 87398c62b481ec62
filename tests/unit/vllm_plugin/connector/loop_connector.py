"""The real connector with a fake sidecar and a clock that tests move. vLLM loads it by module path."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from typing_extensions import override

from contextcache.clock import ManualClock
from kv_sidecar.client import EngineSidecarClient
from tests.unit.vllm_plugin.connector.fake_sidecar import FakeSidecar
from vllm_plugin.connector import ContextCacheConnector
from vllm_plugin.connector.sidecar_link import Arena


class LoopConnector(ContextCacheConnector):
    sidecar: ClassVar[FakeSidecar]
    clock: ClassVar[ManualClock]  # set by the fixture before vLLM makes one

    @override
    def connect_sidecar(self, timeout_s: float) -> EngineSidecarClient:
        return self.sidecar

    @override
    def open_arena(self, on_gone: Callable[[], None]) -> Arena:
        if self.sidecar.arena is None:
            raise OSError("refused")
        return self.sidecar.arena
