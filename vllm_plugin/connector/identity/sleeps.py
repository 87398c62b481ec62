"""Weights across a sleep of the engine: whether a woken worker computes with the weights it went to sleep with.

A pause for sleep looks to a connector like any order to forget: level 1 keeps the weights, level 2 discards them, and
weights are often updated before the wake-up. So samples of the tensors in memory are compared. vLLM shows a connector
neither its model nor its sleep. Its worker's `sleep` is watched; where that is not called, weights count as changed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch

from vllm_plugin.connector.identity.weights import PIECES_MAX, PIECES_PER_TENSOR, pieces

log = logging.getLogger(__name__)


class WeightsWord(NamedTuple):
    """Answer of a rank to the question with this number."""

    rank: int
    number: int
    num_sleeps: int
    """Sleeps since the last answer, all with equal weights; 0: the weights may have changed."""


class Sleeps:
    """Sleeps of one worker. `slept` is called by vLLM's thread, `take` by any."""

    def __init__(self, vllm_config: Any) -> None:
        """Adapters and draft models are not compared: with them, weights count as changed."""
        self._model: weakref.ref[Any] | None = None
        self._digest = ""
        """Of the weights before the first sleep since the last answer."""
        self._num_sleeps = 0
        if vllm_config.lora_config is None and vllm_config.speculative_config is None:
            _watch(self)

    def slept(self, model: Any) -> None:
        """Note a sleep that begins. Takes as long as reading 64 MiB of samples; the engine is paused."""
        if not self._num_sleeps:
            self._model, self._digest = weakref.ref(model), memory_digest(model)
        self._num_sleeps += 1

    def take(self) -> int:
        """Return the number of sleeps since the last call; 0 if the weights are not those before the first."""
        num_sleeps, self._num_sleeps = self._num_sleeps, 0
        model = self._model() if num_sleeps and self._model is not None else None
        try:
            return num_sleeps if model is not None and memory_digest(model) == self._digest else 0
        except ValueError:
            return 0


def memory_digest(model: torch.nn.Module) -> str:
    """Return a digest of samples of all tensors of a model, at places that follow from their names and sizes.

    Raises ValueError if the model keeps weights elsewhere, as some kernels of CPUs do.
    """
    if not all(parameter.numel() for parameter in model.parameters()):
        raise ValueError("the model's weights are not in its tensors")
    digest = hashlib.sha256()
    tensors = sorted(chain(model.named_parameters(), model.named_buffers()), key=lambda named: named[0])
    limit = min(PIECES_PER_TENSOR, max(1, PIECES_MAX // max(len(tensors), 1)))
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        reads = list(pieces(name, 0, len(memory), limit))
        samples = torch.cat([memory[start : start + size] for start, size in reads])
        digest.update(memoryview(samples.cpu().numpy()))
    return digest.hexdigest()


def _watch(sleeps: Sleeps) -> None:
    """Have `sleeps` hear of each sleep of a vLLM worker in this process, before it begins."""
    seer = weakref.ref(sleeps)
    for module, name in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker")):
        # The worker of this process is imported.
        kind = getattr(sys.modules.get(f"vllm.v1.worker.{module}"), name, None)
        if kind is not None and (sleep := vars(kind).get("sleep")) is not None:
            kind.sleep = _watched(sleep, seer)


def _watched(sleep: Callable[..., None], seer: weakref.ref[Sleeps]) -> Callable[..., None]:
    @functools.wraps(sleep)
    def watched(worker: Any, *arguments: Any, **named: Any) -> None:
        try:
            if (sleeps := seer()) is not None:
                sleeps.slept(worker.get_model())
        except Exception:
            # The engine's sleep must not end with us.
            log.exception("weights not sampled, stored KV is not used after this sleep")
        sleep(worker, *arguments, **named)

    return watched
