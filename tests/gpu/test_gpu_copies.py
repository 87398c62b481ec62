"""KV on a real GPU: the contract of all kinds, the shapes of real models, and the engine's stream beside our own.

Skipped by name where there is no GPU. Rates are printed, never asserted.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.contract.paged_layers_contract import PagedLayersContract
from tests.kit.paged_kv import Owner, register, room_in
from tests.kit.until import wait_until
from vllm_plugin.connector.copies.codec import STEPS, CodedLayers
from vllm_plugin.connector.copies.cuda_copies import DeviceLayers
from vllm_plugin.connector.copies.layout import open_layers
from vllm_plugin.connector.copies.pages import PageCopy, Pages, page_bytes

ARENA_BYTES = 1 << 20
FILE_TOKENS = 256
SHUFFLED = [(23 * number + 7) % 64 for number in range(64)]
"""Blocks of which no two neighbours are neighbours."""
CYCLES = 200_000_000
"""Of the GPU's clock, a tenth of a second: the engine is still at work when copies are asked for."""


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")


def memory_of(size_bytes: int) -> Pages:
    """Return shared memory with memory behind it, as an arena's."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)
    memory[:] = 0
    return memory


@dataclass
class GpuKind:
    """Layers over a GPU's memory; pages are staged unless memory is registered."""

    registered: bool
    arena: Pages = field(default_factory=lambda: memory_of(ARENA_BYTES))
    owners: list[Owner] = field(default_factory=list)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda()

    def open(self, kv: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]) -> DeviceLayers:
        layers = open_layers(kv, num_blocks, groups)
        assert isinstance(layers, DeviceLayers)
        if self.registered:
            self.arena = memory_of(ARENA_BYTES)  # the one before may still be registered
            register(layers, self.arena, self.owners)
        return layers

    def room(self, size_bytes: int) -> Pages:
        return room_in(self.arena, size_bytes)


class TestRegistered(PagedLayersContract):
    """Pages in an arena that the driver knows."""

    kind = GpuKind(registered=True)


class TestStaged(PagedLayersContract):
    """Pages in any memory."""

    kind = GpuKind(registered=False)


class Group(NamedTuple):
    """Layers of a model on one rank, in bfloat16."""

    layers: int
    heads: int
    head_dim: int
    block_tokens: int = 16


MODELS = {
    "Llama 3 8B": (Group(32, 8, 128),),
    "Llama 3 70B, one of eight ranks": (Group(80, 1, 128),),
    "Gemma 3 27B, five groups of sliding layers and one of full ones": (*[Group(10, 16, 128)] * 5, Group(12, 16, 128)),
}


@pytest.fixture
def owners() -> Iterator[list[Owner]]:
    owners: list[Owner] = []
    yield owners
    owners.clear()


@pytest.fixture(scope="module")
def link() -> tuple[float, float]:
    """Return what one plain copy of pinned memory makes of the way from the device and to it, in GB/s."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    host = torch.ones(256 << 20, dtype=torch.uint8).pin_memory()
    device = host.cuda()
    rates = []
    for target, source in ((host, device), (device, host)):
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began_s)
        rates.append(host.numel() / sorted(seconds)[2] / 1e9)
    return rates[0], rates[1]


@pytest.mark.parametrize("blocks", ["shuffled", "ascending"])
@pytest.mark.parametrize("order", ["NHC", "HNC"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("registered", [True, False])
def test_a_context_of_a_real_model_comes_back_bit_by_bit(  # fixtures and parameters
    model: str,
    order: str,
    registered: bool,
    blocks: str,
    owners: list[Owner],
    link: tuple[float, float],
) -> None:
    num_tokens = 2048
    num_pages = FILE_TOKENS // 16
    of_context = num_tokens // 16
    num_blocks = 2 * of_context * len(MODELS[model]) + 1
    kv, groups = _kv_of(MODELS[model], order, num_blocks)
    layers = open_layers(kv, num_blocks, groups)
    assert isinstance(layers, DeviceLayers)
    free = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)).add(1).tolist()
    if blocks == "ascending":
        free.sort()
    # A block is of one group at a time: the groups' layers lie over each other.
    owned = [free[start : start + of_context] for start in range(0, len(free), of_context)]
    old, new = owned[0::2], owned[1::2]
    sizes = [num_pages * page_bytes(shapes) for shapes in layers.shapes]
    arena = memory_of(sum(sizes) * of_context // num_pages)
    if registered:
        register(layers, arena, owners)

    def copies(ids: list[list[int]]) -> Iterator[PageCopy]:
        at = 0
        for start in range(0, of_context, num_pages):
            for group, size in enumerate(sizes):
                pages = arena[at : at + size]
                own = ids[group][start : start + num_pages]
                yield PageCopy(group, own, pages, num_pages, after=layers.fence())
                at += size

    seconds = []
    for _ in range(5):
        began_s = time.perf_counter()
        for copy in copies(old):
            layers.gather([copy])
        saved_s = time.perf_counter()
        for copy in copies(new):
            layers.scatter([copy])
        seconds.append((saved_s - began_s, time.perf_counter() - saved_s))
    rates = [arena.nbytes / sorted(times)[2] / 1e9 for times in zip(*seconds, strict=True)]
    said = (
        f"{what} {rate:.1f} GB/s ({rate / most:.2f} of a copy)"
        for what, rate, most in zip(("save", "load"), rates, link, strict=True)
    )
    how = "registered" if registered else "staged"
    print(f"\n{model}, {order}, {blocks}, {how}: {', '.join(said)}, {arena.nbytes >> 20} MiB")

    for group, names in enumerate(groups):
        for name in names:
            assert torch.equal(kv[name][old[group]], kv[name][new[group]])
            assert int(kv[name][new[group]].count_nonzero()) > 0


@pytest.mark.parametrize("codec", STEPS)
@pytest.mark.parametrize("registered", [True, False])
def test_a_context_that_is_stored_in_fewer_bits_comes_back_nearly(
    codec: str, registered: bool, owners: list[Owner]
) -> None:
    """All but its last page, which is not full: that one exactly."""
    num_pages, num_full = 16, 15
    generator = torch.Generator().manual_seed(2)
    kv = {f"l{i}": torch.randn(64, 8, 16, 256, generator=generator).bfloat16().cuda() for i in range(4)}
    plain = open_layers(kv, 64, [list(kv)])
    assert isinstance(plain, DeviceLayers)
    layers, old, new = CodedLayers(plain, ["full_attention"], codec), [*range(1, 17)], [*range(33, 49)]
    arena = memory_of(layers.stored(0, num_pages, num_full).size_bytes)
    if registered:
        register(plain, arena, owners)
    layers.gather([PageCopy(0, old, arena, num_pages, after=layers.fence(), num_full=num_full)])
    layers.scatter([PageCopy(0, new, arena, num_pages, after=layers.fence(), num_full=num_full)])
    torch.cuda.synchronize()

    for tensor in kv.values():
        off = (tensor[new].float() - tensor[old].float()).abs()
        assert 0 < float(off.max()) < 8 / STEPS[codec]
        assert torch.equal(tensor[new[-1]], tensor[old[-1]])


def _kv_of(model: Sequence[Group], order: str, num_blocks: int) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Return random KV; layers of different groups lie over each other, as vLLM lays them."""
    storages: list[torch.Tensor] = []
    kv, groups = dict[str, torch.Tensor](), list[list[str]]()
    for group, (num_layers, heads, head_dim, tokens) in enumerate(model):
        groups.append([f"{group}.{number}" for number in range(num_layers)])
        for number, name in enumerate(groups[-1]):
            if number == len(storages):
                size = num_blocks * heads * tokens * 2 * head_dim
                random = torch.randint(-(1 << 62), 1 << 62, (size // 4,), device="cuda")
                storages.append(random.view(torch.bfloat16).view(torch.int16))
            shape = (heads, tokens) if order == "HNC" else (tokens, heads)
            tensor = storages[number].view(num_blocks, *shape, 2 * head_dim)
            kv[name] = tensor if order == "HNC" else tensor.transpose(1, 2)
    return kv, groups


@pytest.fixture(params=[(1 << 20, True), (1 << 20, False), (8 << 10, True), (8 << 10, False)], ids=str)
def one_layer(request: pytest.FixtureRequest, owners: list[Owner]) -> tuple[DeviceLayers, torch.Tensor, Pages]:
    """Layers of one tensor of 64 blocks of 1 MiB or 8 KiB, and room for their pages, registered or not."""
    block_bytes, registered = request.param
    kv = torch.zeros(64, 1, 1, block_bytes, dtype=torch.uint8, device="cuda")
    layers, arena = open_layers({"layer": kv}, 64, [["layer"]]), memory_of(64 * block_bytes)
    assert isinstance(layers, DeviceLayers)
    if registered:
        register(layers, arena, owners)
    torch.cuda.synchronize()
    return layers, kv, arena


def test_a_save_brings_what_the_engine_writes_before_the_fence(
    one_layer: tuple[DeviceLayers, torch.Tensor, Pages],
) -> None:
    layers, kv, arena = one_layer
    torch.cuda._sleep(CYCLES)  # the engine's kernels come late
    kv.fill_(5)
    fence = layers.fence()
    layers.gather([PageCopy(0, SHUFFLED, arena, 64, after=fence)])

    assert (arena == 5).all()


def test_a_load_waits_for_what_the_engine_does_before_the_fence(
    one_layer: tuple[DeviceLayers, torch.Tensor, Pages],
) -> None:
    """What reads the blocks before must not find what is loaded, and what zeroes them must not come after it."""
    layers, kv, arena = one_layer
    kv.fill_(3)
    arena[:] = 9
    torch.cuda._sleep(CYCLES)
    seen = kv.clone()
    kv.zero_()
    fence = layers.fence()
    layers.scatter([PageCopy(0, SHUFFLED, arena, 64, after=fence)])
    torch.cuda.synchronize()

    assert bool((seen == 3).all())
    assert bool((kv == 9).all())


def test_the_engine_goes_on_while_pages_are_copied(one_layer: tuple[DeviceLayers, torch.Tensor, Pages]) -> None:
    """Copies wait for the fence and for nothing behind it: what the engine was given later may still be running."""
    layers, kv, arena = one_layer
    kv.fill_(4)
    fence, later = layers.fence(), torch.cuda.Event()
    torch.cuda._sleep(50 * CYCLES)
    later.record()
    layers.gather([PageCopy(0, SHUFFLED, arena, 64, after=fence)])
    was_running = not later.query()
    torch.cuda.synchronize()

    assert was_running
    assert (arena == 4).all()


def test_the_device_is_asked_for_room_once(one_layer: tuple[DeviceLayers, torch.Tensor, Pages]) -> None:
    layers, _, arena = one_layer
    reserved = []
    for _ in range(3):
        layers.gather([PageCopy(0, SHUFFLED, arena, 64, after=layers.fence())])
        layers.scatter([PageCopy(0, SHUFFLED, arena, 64, after=layers.fence())])
        reserved.append(torch.cuda.memory_reserved())

    assert reserved[0] == reserved[1] == reserved[2]


@pytest.mark.parametrize("block_bytes", [8 << 10, 8 * 1021, 1021])
def test_some_blocks_of_a_file_leave_the_pages_of_others_alone(block_bytes: int, owners: list[Owner]) -> None:
    """Also sizes that are no power of two, and those that vLLM's kernel does not take."""
    kv = {f"l{i}": torch.randint(0, 255, (64, 1, 1, block_bytes), dtype=torch.uint8, device="cuda") for i in range(3)}
    before = {name: tensor.clone() for name, tensor in kv.items()}
    layers, arena = open_layers(kv, 64, [list(kv)]), memory_of(-(-3 * 16 * block_bytes // 4096) * 4096)
    assert isinstance(layers, DeviceLayers)
    register(layers, arena, owners)
    pages = arena[: 3 * 16 * block_bytes]
    pages[:] = 77
    layers.gather([PageCopy(0, [9, 3, 4, 60], pages, 16, first_page=5, after=layers.fence())])
    rows = pages.reshape(3, 16, block_bytes)
    for number, tensor in enumerate(kv.values()):
        assert np.array_equal(rows[number, 5:9], tensor[[9, 3, 4, 60]].cpu().numpy().reshape(4, block_bytes))
    assert (rows[:, :5] == 77).all()
    assert (rows[:, 9:] == 77).all()

    layers.scatter([PageCopy(0, [20, 11, 12, 40], pages, 16, first_page=5, after=layers.fence())])
    torch.cuda.synchronize()
    others = [block for block in range(64) if block not in {20, 11, 12, 40}]
    for name, tensor in kv.items():
        assert torch.equal(tensor[[20, 11, 12, 40]], before[name][[9, 3, 4, 60]])
        assert torch.equal(tensor[others], before[name][others])


def test_where_no_kernel_runs_small_blocks_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.kv_offload.cpu.swap_blocks_triton._swap_blocks_kernel", None)
    kv = torch.arange(8 * 8192, device="cuda").view(torch.uint8).view(64, 1, 1, 8192)
    before = kv.clone()
    layers, arena = open_layers({"layer": kv}, 64, [["layer"]]), memory_of(64 * 8192)
    layers.gather([PageCopy(0, SHUFFLED, arena, 64)])
    kv.zero_()
    layers.scatter([PageCopy(0, SHUFFLED, arena, 64, after=layers.fence())])
    torch.cuda.synchronize()

    assert torch.equal(kv, before)


def test_memory_that_the_driver_refuses_is_staged(caplog: pytest.LogCaptureFixture, owners: list[Owner]) -> None:
    """It is registered already: by somebody else, as far as the driver can tell."""
    kv, arena = torch.zeros(8, 1, 1, 1 << 20, dtype=torch.uint8, device="cuda"), memory_of(8 << 20)
    first, second = (open_layers({"layer": kv}, 8, [["layer"]]) for _ in range(2))
    assert isinstance(first, DeviceLayers)
    assert isinstance(second, DeviceLayers)
    register(first, arena, owners)
    owner = Owner()
    with caplog.at_level(logging.WARNING):
        second.reach(arena.data, owner=owner)
        [line] = wait_until(lambda: list(caplog.records), what="a line in the log")
    arena[:] = 6
    second.scatter([PageCopy(0, range(8), arena, 8, after=second.fence())])
    torch.cuda.synchronize()

    assert "cudaHostRegister" in line.__dict__["reason"]
    assert not second._registered.holds(arena)
    assert bool((kv == 6).all())


def test_memory_is_given_back_when_its_owner_has_gone(owners: list[Owner]) -> None:
    kv, arena = torch.zeros(8, 1, 1, 1 << 20, dtype=torch.uint8, device="cuda"), memory_of(8 << 20)
    layers = open_layers({"layer": kv}, 8, [["layer"]])
    assert isinstance(layers, DeviceLayers)
    for _ in range(2):  # the driver refuses memory that it still has
        register(layers, arena, owners)
        owners.clear()
        wait_until(lambda: not layers._registered.holds(arena), what="it is let go of")
        wait_until(lambda: _is_free(arena), what="the driver has let go of it")


def _is_free(memory: Pages) -> bool:
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)):
        return False
    cudart.cudaHostUnregister(memory.ctypes.data)
    return True
