"""An engine with the connector in it, a fake sidecar, and tokens signed with the deployment's secret."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # vLLM and torch warn about themselves while they are imported; from here on warnings are errors again.
    warnings.simplefilter("ignore")
    import torch._inductor.compile_fx  # noqa: F401  # imported by vLLM at a moment of its choosing
    import vllm.v1.core.sched.scheduler  # noqa: F401  # brings in everything else
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from contextcache.clock import ManualClock
from contextcache.identity import KV_TRANSFER_KEY, KVTransfer, sign_kv_transfer
from tests.kit.scheduler_loop import LoopConfig, SchedulerLoop, ours
from tests.unit.vllm_plugin.connector.fake_sidecar import FakeSidecar
from tests.unit.vllm_plugin.connector.loop_connector import LoopConnector
from vllm_plugin.connector.settings import Bounds

SECRET = b"a secret for tests, 32 bytes or more"
ARENA_BYTES = 16 << 20
EXPIRES_AT_MS = 2_000_000_000_000


def cache_ref(number: int) -> str:
    return f"ref_{number:032x}"


def transfer(
    *, load: tuple[str, ...] = (), save: str | None = None, secret: bytes = SECRET, tenant: str = "demo"
) -> dict[str, Any]:
    """Return `kv_transfer_params` as the turn middleware makes them."""
    signed = sign_kv_transfer(
        KVTransfer(
            tenant=tenant,
            session_id="ctx_1",
            request_id=f"request-{save or ''}-{'-'.join(load)}",
            load=load,
            save=save,
            expires_at_ms=EXPIRES_AT_MS,
        ),
        secret,
    )
    return {KV_TRANSFER_KEY: signed}


@dataclass
class Engine:
    """A loop with its sidecar; see SchedulerLoop for what it checks by itself."""

    loop: SchedulerLoop
    sidecar: FakeSidecar
    clock: ManualClock

    def save(self, token_ids: list[int], ref: str, *, name: str = "save", forgets: bool = False) -> list[int]:
        """Run a request that saves, to its end; return its output. `forgets`: empty the engine's prefix cache then."""
        answer = self.loop.play(name, token_ids, params=transfer(save=ref))
        if forgets:
            self.loop.forget_prefixes()
        return answer

    def counted(self, name: str, reason: str | None = None) -> int:
        sides = (ours(self.loop.worker).worker_side, ours(self.loop.connector).scheduler_side)
        return sum(side.counters.get(name, reason) for side in sides)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and a file to stand for weights: the toy model reads none."""
    directory = tmp_path_factory.mktemp("config")
    (directory / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,'
        ' "vocab_size": 1000, "max_position_embeddings": 2048}'
    )
    (directory / "weights.bin").write_bytes(b"weights")
    return directory


@pytest.fixture
def start_engine(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """Return a function that makes engines; all share one sidecar.

    `bounds`: constants of the settings, changed. `multi`: connectors of a MultiConnector.
    """
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    loops: list[SchedulerLoop] = []

    def start(
        *,
        sidecar: FakeSidecar | None = None,
        extra: dict[str, Any] | None = None,
        bounds: dict[str, int] | None = None,
        directory: Path = model_directory,
        multi: list[dict[str, Any]] | None = None,
        **config: Any,
    ) -> Engine:
        LoopConnector.sidecar = sidecar or FakeSidecar(arena_bytes=ARENA_BYTES)
        LoopConnector.clock = ManualClock()
        for name, value in (bounds or {}).items():
            monkeypatch.setattr(Bounds, name, value)
        settings = {"sidecar": "unix:///nowhere", "secret_file": str(secret), **(extra or {})}
        name = "tests.unit.vllm_plugin.connector.loop_connector:LoopConnector"
        if multi:
            name, settings = f"{MultiConnector.__module__}:MultiConnector", {"connectors": multi}
        loop = SchedulerLoop(LoopConfig(directory, name, extra=settings, **config))
        loops.append(loop)
        loop.settle()
        return Engine(loop, LoopConnector.sidecar, LoopConnector.clock)

    yield start
    LoopConnector.sidecar.limit_passed.set()
    for event in LoopConnector.sidecar.hang.values():
        event.set()
    for loop in loops:
        loop.close()


@pytest.fixture
def engine(start_engine: Callable[..., Engine]) -> Engine:
    return start_engine()
