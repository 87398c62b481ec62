"""A vLLM engine on a tiny model in a process of its own: started, asked, killed, and started on other weights.

    python -m tests.kit.tiny_engine '<JSON of Start>'

Speaks JSON lines: one order in, one answer out. Orders are the methods of `_Served`, with their arguments by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contextcache.identity import KV_TRANSFER_KEY, KVTransfer, sign_kv_transfer
from deploy.local.model import CACHE_DIR
from tests.kit.patience import CONNECTOR

SECRET = b"a secret for tests, 32 bytes or more"
EXPIRES_AT_MS = 2_000_000_000_000
ENVIRONMENT = {
    "VLLM_CACHE_ROOT": str(CACHE_DIR),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_MARK = "answer: "


@dataclass
class Start:
    """What an engine is started with."""

    model: str
    sidecar: str = ""
    """Address of a kv-sidecar; empty: an engine without the connector."""
    secret_file: str = ""
    engine_args: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] = field(default_factory=dict)
    """More of `kv_connector_extra_config`."""
    kv_transfer: dict[str, Any] = field(default_factory=dict)
    """Fields of vLLM's KVTransferConfig for a connector that is not ours."""


class TinyEngine:
    """The caller's end."""

    module = "tests.kit.tiny_engine"
    """What runs as the engine's end."""

    def __init__(self, start: Start) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, json.dumps(asdict(start))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self.log: list[str] = []
        try:
            self.facts: dict[str, Any] = self._answer()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> TinyEngine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def order(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def ask(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """Generate greedily; `token_ids`, `logprobs`, `cached_tokens`. See `_Served._params` for more."""
        return self.ask_all([{"prompt": prompt, **more}])[0]

    def ask_all(self, questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Ask all at once; each as the arguments of `ask`."""
        return self.order("ask_all", questions=questions)  # type: ignore[no-any-return]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            self.log.append(line)
        raise AssertionError("the engine ended:\n" + "".join(self.log[-40:]))


class _Served:
    """The engine's end."""

    def __init__(self, start: Start) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(**start.kv_transfer) if start.kv_transfer else None
        if start.sidecar:
            transfer = KVTransferConfig(
                kv_connector="ContextCacheConnector",
                kv_connector_module_path="vllm_plugin.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "sidecar": start.sidecar,
                    "secret_file": start.secret_file,
                    **CONNECTOR,
                    **start.connector,
                },
            )
        defaults = {"dtype": "float32", "block_size": 32, "enforce_eager": True, "max_model_len": 1024}
        self._llm = LLM(model=start.model, kv_transfer_config=transfer, **(defaults | start.engine_args))
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._num_asked = 0

    def facts(self) -> dict[str, Any]:
        """What vLLM made of the model."""
        groups = self._core.scheduler.kv_cache_config.kv_cache_groups
        return {"groups": [type(group.kv_cache_spec).__name__ for group in groups]}

    def ask_all(self, *, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": question["prompt"]} for question in questions],
            [self._params(question) for question in questions],
            use_tqdm=False,
            lora_request=[_adapter(question.get("adapter")) for question in questions],
        )
        while self._core.scheduler.has_requests():
            self._llm.llm_engine.step()
        return [_answer_of(output) for output in outputs]

    def _params(self, question: dict[str, Any]) -> Any:
        """Take `load`, `save`: names of contexts; `num_tokens` to generate. `adapter`: fields of a LoRARequest."""
        from vllm import SamplingParams

        load, save = question.get("load", ()), question.get("save")
        self._num_asked += 1
        transfer = KVTransfer("demo", "ctx_1", f"request-{self._num_asked}", tuple(load), save, EXPIRES_AT_MS)
        token = {"kv_transfer_params": {KV_TRANSFER_KEY: sign_kv_transfer(transfer, SECRET)}}
        return SamplingParams(
            temperature=0,
            max_tokens=question.get("num_tokens", 6),
            ignore_eos=True,
            logprobs=1,
            extra_args=token if load or save else None,
        )

    def load_adapter(self, **adapter: Any) -> bool:
        """Have vLLM read an adapter now, as its API server does; the fields are a LoRARequest's."""
        return bool(self._llm.llm_engine.add_lora(_adapter(adapter)))

    def unload_adapter(self, *, adapter_id: int) -> bool:
        """Have it out of vLLM's memory, as when others need its place."""
        return bool(self._llm.llm_engine.remove_lora(adapter_id))

    def forget(self, *, connector: bool) -> bool:
        """Empty the engine's prefix cache, and tell the connector to forget when asked to."""
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def pause(self) -> bool:
        """Pause and go on, as weight updates do; the pause clears the caches."""
        self._core.pause_scheduler(mode="abort", clear_cache=True)
        self._core.resume_scheduler()
        return True

    def sleep(self, *, level: int, change: float = 0.0) -> bool:
        """Sleep and wake up, adding to all weights between. On a CPU the worker keeps its memory."""
        self._llm.sleep(level=level)
        for worker in self._llm.collective_rpc(lambda worker: worker):
            for parameter in worker.get_model().parameters():
                parameter.data.add_(change)
        self._llm.wake_up()
        return True

    def totals(self) -> dict[str, float]:
        """vLLM's own counters; with `disable_log_stats` there are none."""
        return {metric.name: metric.value for metric in self._llm.get_metrics() if hasattr(metric, "value")}

    def counts(self) -> dict[str, int]:
        """What both halves of the connector have counted, `name` or `name reason`."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from vllm_plugin.connector.telemetry import _SEPARATOR

        sides = (self._core.scheduler.connector.scheduler_side, get_kv_transfer_group().worker_side)
        found: Counter[str] = Counter()
        for side in sides:
            for key, count in side.counters._total.items():
                found[key.replace(_SEPARATOR, " ").strip()] += count
        return dict(found)


def _adapter(fields: dict[str, Any] | None) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(**fields) if fields else None


def _answer_of(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    return {
        "token_ids": ids,
        "logprobs": [step[token].logprob for step, token in zip(answer.logprobs, ids, strict=True)],
        "cached_tokens": output.num_cached_tokens,
    }


def main() -> None:
    served = _Served(Start(**json.loads(sys.argv[1])))
    _say(served.facts())
    for line in sys.stdin:
        order = json.loads(line)
        _say(getattr(served, order.pop("what"))(**order))


def _say(answer: Any) -> None:
    """Answer in one write: other threads log to the same pipe."""
    sys.stdout.flush()
    sys.stdout.write(f"\n{_MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
