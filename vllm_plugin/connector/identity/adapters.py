"""LoRA adapters by their content: the adapter of a request, and whether the connector can name it.

vLLM knows an adapter by a name and a number, both of which may come to mean other weights: a file is written over, an
adapter is loaded in place, is evicted and read again. So the digest of the worker's copy in memory counts.
A name is carried while all that was ever loaded under it in this engine was the same, and no other name had its number:
then every KV under that name, vLLM's own prefix cache included, is of that content. The first difference ends it, for
as long as the engine lives (ADR 0047).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from vllm_plugin.connector.metadata import Adapter
from vllm_plugin.connector.transfer import TransferPool

log = logging.getLogger(__name__)

UNKNOWN, CHANGED = "adapter_unknown", "adapter_changed"
"""Reasons for leaving an adapter's requests alone: its content is not known; its name has meant several contents."""
_DIGEST_CHARS = 48
"""Length of a content's digest: with the engine's fingerprint it fits the longest fingerprint."""
_MOST_NAMES = 65_536
"""Names that are remembered in an engine's life; later names are left alone."""
_MOST_LOADS = 1024
"""Number of adapters that are remembered; older ones are asked for, or read, again."""
_QUEUE_LIMIT = 64
_SETTINGS = ("lora_dtype", "target_modules", "fully_sharded_loras", "bias_enabled", "enable_tower_connector_lora")
"""Fields of vLLM's LoRAConfig that change the computation of an adapter."""


@dataclass(frozen=True, slots=True)
class AdapterWord:
    """One rank's word about an adapter. Neither digest nor reason: it is being read."""

    rank: int
    adapter_id: int
    name: str
    """Under which it was loaded; empty: it is not."""
    digest: str = ""
    reason: str = ""
    """Reason for leaving its requests alone."""


@dataclass(slots=True)
class _Load:
    name: str
    adapter: weakref.ref[Any]
    """vLLM's own, while it has it."""
    digest: str = ""


class LoadedAdapters:
    """Adapters of one worker. Called by the engine's thread, and returns at once; adapters are read in a thread."""

    def __init__(self, rank: int, lora_config: Any) -> None:
        """`lora_config`: vLLM's; None: there are no adapters, and none are watched."""
        self._rank = rank
        self._settings = {name: str(getattr(lora_config, name, None)) for name in _SETTINGS}
        self._lock = threading.Lock()
        self._loads: dict[int, _Load] = {}
        """The last one of each number."""
        self._contents: dict[str, str] = {}
        """By name: the digest of all that was loaded under it, or why its requests are left alone."""
        self._num_reading: Counter[str] = Counter()
        self._news: set[int] = set()
        self._is_blind = False
        self._pool = TransferPool("adapters", threads=1, queue_limit=_QUEUE_LIMIT)
        if lora_config is not None:
            _watch(self)

    def seen(self, request: Any, adapter: Any) -> None:
        """Note an adapter that vLLM is about to use: its LoRARequest, and vLLM's copy in memory."""
        adapter_id, name = int(request.lora_int_id), str(request.lora_name)
        with self._lock:
            load = self._loads.get(adapter_id)
            if load is not None and load.name != name:
                self._spoil(CHANGED, load.name, name)
            if load is not None and load.adapter() is adapter:
                return
            self._loads.pop(adapter_id, None)
            if len(self._loads) >= _MOST_LOADS:
                del self._loads[next(iter(self._loads))]
            self._loads[adapter_id] = load = _Load(name, weakref.ref(adapter))
            self._news.add(adapter_id)
            if request.load_inplace:
                # As vLLM keeps it, each step reads the files again.
                self._spoil(CHANGED, name)
            is_full = name not in self._contents and len(self._contents) >= _MOST_NAMES
            if is_full or self._contents.get(name) in (UNKNOWN, CHANGED):
                return
            self._num_reading[name] += 1
        if self._pool.try_submit(functools.partial(self._read, adapter_id, load, adapter)) is None:
            with self._lock:
                # The next step tries again; until then it is one that was never seen.
                self._num_reading[name] -= 1
                self._loads.pop(adapter_id, None)

    def give_up(self) -> None:
        """Know nothing of any adapter from now on: one was used and not seen."""
        with self._lock:
            self._is_blind = True
            self._news.update(self._loads)

    def ask(self, adapter_ids: Iterable[int]) -> None:
        """Report these with the next words."""
        with self._lock:
            self._news.update(adapter_ids)

    def take_words(self) -> tuple[AdapterWord, ...]:
        """Return words that are new or were asked for since the last call."""
        if not self._news:
            return ()
        with self._lock:
            news, self._news = self._news, set()
            return tuple(self._word(adapter_id) for adapter_id in sorted(news))

    def holds(self, adapter: Adapter) -> bool:
        """Return whether all KV under an adapter's name is of its content."""
        with self._lock:
            load = self._loads.get(adapter.adapter_id)
            is_it = load is not None and (load.name, load.digest) == (adapter.name, adapter.digest)
            is_read = not self._is_blind and not self._num_reading[adapter.name]
            return is_it and is_read and self._contents.get(adapter.name) == adapter.digest

    def is_loaded(self, adapter: Adapter) -> bool:
        """Return whether `holds` is true and vLLM has the adapter in memory now: else it reads the file again."""
        with self._lock:
            load = self._loads.get(adapter.adapter_id)
            is_there = load is not None and load.adapter() is not None
        return is_there and self.holds(adapter)

    def close(self, timeout_s: float) -> bool:
        """Drop waiting work; return whether the thread has ended."""
        return self._pool.close(timeout_s)

    def _word(self, adapter_id: int) -> AdapterWord:
        load = self._loads.get(adapter_id)
        if load is None or self._is_blind:
            return AdapterWord(self._rank, adapter_id, "", reason=UNKNOWN)
        content = self._contents.get(load.name, "" if self._num_reading[load.name] else UNKNOWN)
        if content in (UNKNOWN, CHANGED):
            return AdapterWord(self._rank, adapter_id, load.name, reason=content)
        return AdapterWord(self._rank, adapter_id, load.name, load.digest)

    def _read(self, adapter_id: int, load: _Load, adapter: Any) -> None:
        try:
            digest = content_digest(adapter, self._settings)
        except Exception:
            # A kind of adapter that we do not know: it must not be taken for another.
            log.exception("adapter not read")
            digest = ""
        with self._lock:
            self._num_reading[load.name] -= 1
            load.digest = digest
            if not digest:
                self._spoil(UNKNOWN, load.name)
            elif self._contents.setdefault(load.name, digest) != digest:
                self._spoil(CHANGED, load.name)
            self._news.add(adapter_id)

    def _spoil(self, reason: str, *names: str) -> None:
        for name in names:
            if self._contents.get(name) not in (UNKNOWN, CHANGED) and (
                name in self._contents or len(self._contents) < _MOST_NAMES
            ):
                log.warning("KV of an adapter is no longer saved or loaded", extra={"reason": reason})
                self._contents[name] = reason
        self._news.update(adapter_id for adapter_id, load in self._loads.items() if load.name in names)


class KnownAdapters:
    """The scheduler's knowledge of adapters. The engine's thread alone."""

    def __init__(self) -> None:
        self._words: dict[int, dict[int, AdapterWord]] = {}
        self._names: dict[int, str] = {}
        self._spoiled: set[str] = set()
        """Names that share a number: vLLM computes with whichever was loaded first."""
        self._asked: set[int] = set()
        self._is_full = False
        """Whether more names were spoiled than are remembered: then all are."""

    def observe(self, lora_request: Any) -> None:
        """Look at the adapter of any request, also of those that are none of ours."""
        if self._is_full:
            return
        adapter_id, name = int(lora_request.lora_int_id), str(lora_request.lora_name)
        if adapter_id not in self._names and len(self._names) < _MOST_NAMES:
            self._names[adapter_id] = name
        if self._names.get(adapter_id) != name:
            self._spoiled |= {name, self._names.get(adapter_id, name)}
        self._is_full = self._is_full or len(self._spoiled) > _MOST_NAMES

    def learn(self, words: Iterable[AdapterWord]) -> None:
        """Take the workers' words."""
        for word in words:
            self._words.setdefault(word.adapter_id, {})[word.rank] = word
        while len(self._words) > _MOST_LOADS:
            del self._words[next(iter(self._words))]

    def find(self, lora_request: Any, world_size: int) -> Adapter | str | None:
        """Return a request's adapter, or why it cannot be told, or None: the workers have been asked."""
        adapter_id, name = int(lora_request.lora_int_id), str(lora_request.lora_name)
        if self._is_full or name in self._spoiled or lora_request.load_inplace:
            return CHANGED
        words = self._words.get(adapter_id, {})
        if len(words) < world_size:
            self._asked.add(adapter_id)
            return None
        if reasons := {word.reason for word in words.values() if word.reason}:
            # It may have been loaded since.
            self._asked.add(adapter_id)
            return min(reasons)
        if any(word.name != name for word in words.values()):
            return CHANGED
        digests = {word.digest for word in words.values()}
        if "" in digests:
            return None
        return Adapter(adapter_id, name, digests.pop()) if len(digests) == 1 else UNKNOWN

    def take_asked(self) -> tuple[int, ...]:
        """Return the numbers that the workers have to say something of."""
        asked, self._asked = tuple(sorted(self._asked)), set()
        return asked


def content_digest(adapter: Any, settings: Mapping[str, str]) -> str:
    """Return a hex digest of vLLM's copy of an adapter (its LoRAModel). Raises TypeError for an unknown part."""
    digest = hashlib.sha256(b"context-cache adapter 1\n")
    _feed(digest.update, settings)
    _feed(digest.update, {name: value for name, value in vars(adapter).items() if name != "id"})
    return digest.hexdigest()[:_DIGEST_CHARS]


def _feed(update: Callable[[Any], None], value: Any) -> None:
    """Hash a value so that no two have the same bytes."""
    if isinstance(value, torch.Tensor):
        update(f"tensor {value.dtype} {tuple(value.shape)}\n".encode())
        # Outside the interpreter's lock.
        update(memoryview(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    elif isinstance(value, Mapping):
        update(f"mapping {len(value)}\n".encode())
        for key in sorted(value):
            _feed(update, str(key))
            _feed(update, value[key])
    elif isinstance(value, list | tuple):
        update(f"list {len(value)}\n".encode())
        for item in value:
            _feed(update, item)
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype | Enum):
        text = repr(value).encode()
        update(f"{type(value).__name__} {len(text)}\n".encode())
        update(text)
    elif type(value).__module__.startswith("vllm."):
        _feed(update, type(value).__name__)
        _feed(update, vars(value))
    else:
        raise TypeError(f"adapters with a {type(value).__name__} are not supported")


def are_mixed_up(vllm_config: Any) -> bool:
    """Return whether the base model's requests get an adapter that is in the same step, as in vLLM 0.32 on the CPU.

    Its kernels read "no adapter", -1, as the last one (vllm-project/vllm#48421). Tried out, so that it ends with them.
    """
    if getattr(vllm_config, "lora_config", None) is None or vllm_config.device_config.device_type != "cpu":
        return False
    try:
        from vllm.lora.ops.torch_ops import bgmv_expand

        output = torch.zeros(1, 1)
        bgmv_expand(torch.ones(1, 1), torch.ones(1, 1, 1), output, torch.tensor([-1]))
    except Exception:
        log.exception("unknown adapter kernel in vLLM")
        return True
    return bool(output.any())


def _watch(adapters: LoadedAdapters) -> None:
    """Have `adapters` see every adapter that vLLM uses from now on.

    vLLM tells connectors nothing of adapters. Its worker's manager is asked for each adapter of each step, by
    `add_adapter`; where that is not so nothing is seen, and requests with adapters are left alone.
    """
    from vllm.lora import worker_manager

    seer = weakref.ref(adapters)
    for kind in (worker_manager.WorkerLoRAManager, worker_manager.LRUCacheWorkerLoRAManager):
        if (add := vars(kind).get("add_adapter")) is not None:
            kind.add_adapter = _watched(add, seer)


def _watched(add: Callable[..., bool], seer: weakref.ref[LoadedAdapters]) -> Callable[..., bool]:
    @functools.wraps(add)
    def add_adapter(manager: Any, adapter_request: Any) -> bool:
        was_added = add(manager, adapter_request)
        if (adapters := seer()) is not None:
            try:
                model_manager = manager._adapter_manager  # noqa: SLF001  # vLLM has no other way
                if (held := model_manager.get_adapter(adapter_request.lora_int_id)) is not None:
                    adapters.seen(adapter_request, held)
            except Exception:
                # The engine's step must not end with us.
                log.exception("adapters unknown, their KV is not saved or loaded")
                adapters.give_up()
        return was_added

    return add_adapter
