"""KV caches that vLLM registers, as layers whose pages can be copied. The only place that knows their shapes.

vLLM registers one tensor a layer, a strided view that is logically `[B, H, N, C]`: block, kv head, token in block,
K then V content. When the attention kernel wants smaller blocks than the engine allocates, dimension 0 is
`num_blocks * ratio` kernel blocks and N is the kernel's block. The physical order is the backend's choice (vLLM 0.32
v1/kv_cache_layout.py; on GPUs mostly `[B, N, H, C]`). Here axes are put into the order in which they lie in memory, so
that a page is one stretch wherever a block is one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from kv_sidecar.client import populate
from vllm_plugin.connector.copies.cpu_copies import HostLayers
from vllm_plugin.connector.copies.cuda_copies import DeviceLayers
from vllm_plugin.connector.copies.cuda_driver import CudaDriver
from vllm_plugin.connector.copies.pages import LOGICAL, LayerShape, PagedLayers
from vllm_plugin.connector.engine_check import UncarriedEngine

log = logging.getLogger(__name__)


def open_layers(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]) -> PagedLayers:
    """Return the layers of `register_kv_caches`; `groups` are the names of their layers.

    Raises UncarriedEngine for a layer without pages.
    """
    shapes, views = layer_views(kv_caches, num_blocks, groups)
    devices = {view.device for own in views for view in own}
    if devices == {torch.device("cpu")}:
        return HostLayers(shapes, views)
    if len(devices) > 1 or (device := devices.pop()).type != "cuda":
        raise UncarriedEngine("unsupported_layers", "KV must be on one CUDA GPU or on the CPU")
    return DeviceLayers(shapes, views, CudaDriver(device))


def layer_views(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]
) -> tuple[tuple[tuple[LayerShape, ...], ...], list[list[torch.Tensor]]]:
    """Return the layers' shapes and, of each plane, uint8 `[num_blocks, *axes in the order of the shape]`.

    Layers of a group that share another's tensor (cross-layer sharing) are left out: their bytes are already there.
    """
    shapes, views = [], []
    for names in groups:
        own: dict[tuple[int, tuple[int, ...]], tuple[LayerShape, torch.Tensor]] = {}
        for name in names:
            tensor = kv_caches.get(name)
            if not isinstance(tensor, torch.Tensor):
                raise UncarriedEngine("unsupported_layers", f"layer {name} shares its KV tensor")
            own.setdefault((tensor.data_ptr(), tuple(tensor.shape)), _layer(name, tensor, num_blocks))
        if not own:
            raise UncarriedEngine("no_layers", "the engine registered no KV layers")
        shapes.append(tuple(shape for shape, _ in own.values()))
        views.append(_planes([view for _, view in own.values()]))
    return tuple(shapes), views


def _layer(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[LayerShape, torch.Tensor]:
    if tensor.dim() != 4 or tensor.shape[0] % num_blocks or tensor.stride(-1) != 1:
        raise UncarriedEngine(
            "unsupported_layers", f"layer {name} must have a [B, H, N, C] view of {num_blocks} blocks"
        )
    view = tensor.unflatten(0, (num_blocks, -1)).view(torch.uint8)
    axes = _in_memory(view)
    ratio, heads, tokens, content_bytes = view.shape[1:]
    order = "".join(LOGICAL[axis - 1] for axis in axes)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LayerShape(name, ratio, heads, tokens, content_bytes, order, dtype), view.permute(0, *axes)


def _planes(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return one view of all layers, `[num_blocks, bytes]`, where their pages lie side by side in each block."""
    first, size = views[0], views[0][0].numel()
    is_one = len(views) > 1 and first.stride(0) >= len(views) * size and first[0].is_contiguous()
    for position, view in enumerate(views):
        is_alike = (view.shape, view.stride()) == (first.shape, first.stride())
        is_next = view.data_ptr() == first.data_ptr() + position * size
        is_there = view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        is_one = is_one and is_alike and is_next and is_there
    return [first.as_strided((len(first), len(views) * size), (first.stride(0), 1))] if is_one else views


def _in_memory(view: torch.Tensor) -> list[int]:
    """Return the axes of a page, outermost first. One of length 1 lies nowhere: it stays where it is."""
    long = [axis for axis in range(1, view.dim()) if view.shape[axis] > 1]
    by_stride = iter(sorted(long, key=lambda axis: -view.stride(axis)))
    return [next(by_stride) if axis in long else axis for axis in range(1, view.dim())]


def prefault(tensors: Iterable[torch.Tensor], *, stopping: threading.Event) -> int:
    """Touch the memory behind a CPU engine's KV once, a step at a time until `stopping`; return the bytes touched.

    The operating system hands such memory out page by page at first touch: on a virtual machine 133 MB took 170 to
    190 ms, as long as all else in restoring 5 800 tokens; cold prompts pay it too. Contents stay as they are.
    Meant for a thread of its own: seconds for some GiB, without the interpreter's lock. Raises nothing.
    """
    begun_s = time.monotonic()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.is_cpu}
    touched_bytes = sum(populate(address, storage.nbytes(), stopping=stopping) for address, storage in storages.items())
    duration_ms = round((time.monotonic() - begun_s) * 1000)
    log.info("KV memory touched", extra={"size_bytes": touched_bytes, "duration_ms": duration_ms})
    return touched_bytes
