"""Layout round trips: whatever the strides and the kernel's block size, pages come back bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_plugin.connector.engine_check import UncarriedEngine
from vllm_plugin.connector.layout import HostLayers, PagedLayers, StagedLayers, open_layers, page_bytes, runs

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM 0.32 v1/kv_cache_layout.py: logical [L, B, H, N, C] in physical order."""
NUM_BLOCKS, HEADS, TOKENS, CONTENT = 12, 2, 8, 6


def paged(order: str, ratio: int, dtype: torch.dtype, *, layers: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return layers as vLLM registers them: logical [B * ratio, H, N / ratio, C] over one storage in `order`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, NUM_BLOCKS * ratio, HEADS, TOKENS // ratio, CONTENT)
    axes = ORDERS[order]
    storage = torch.randint(0, 200, [shape[axis] for axis in axes], generator=generator).to(dtype)
    logical = storage.permute([axes.index(axis) for axis in range(5)])
    return {f"layer{number}": logical[number] for number in range(layers)}


def open_as(kind: str, kv: dict[str, torch.Tensor]) -> PagedLayers:
    host = open_all(kv)
    if kind == "host":
        return host
    views = [tensor.unflatten(0, (NUM_BLOCKS, -1)).view(torch.uint8) for tensor in kv.values()]
    return StagedLayers(host.shapes, [views])


def open_all(kv: dict[str, torch.Tensor], num_blocks: int = NUM_BLOCKS) -> PagedLayers:
    """All in one group."""
    return open_layers(kv, num_blocks, [list(kv)])


def empty_pages(layers: PagedLayers, num_blocks: int, group: int = 0) -> np.ndarray:
    return np.zeros(num_blocks * page_bytes(layers.shapes[group]), dtype=np.uint8)


@given(
    order=st.sampled_from(sorted(ORDERS)),
    target_order=st.sampled_from(sorted(ORDERS)),
    ratio=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    kinds=st.tuples(st.sampled_from(["host", "staged"]), st.sampled_from(["host", "staged"])),
    source=st.permutations(range(NUM_BLOCKS)),
    target=st.permutations(range(NUM_BLOCKS)),
    count=st.integers(1, NUM_BLOCKS),
)
@example(  # no page before the skipped one: an empty list of blocks is one of blocks all the same
    order="BHLNC",
    target_order="BHLNC",
    ratio=1,
    dtype=torch.float32,
    kinds=("host", "staged"),
    source=list(range(NUM_BLOCKS)),
    target=list(range(NUM_BLOCKS)),
    count=1,
)
def test_pages_gathered_here_and_scattered_there_are_bit_exact(
    order: str,
    target_order: str,
    ratio: int,
    dtype: torch.dtype,
    kinds: tuple[str, str],
    source: list[int],
    target: list[int],
    count: int,
) -> None:
    here, there = paged(order, ratio, dtype), paged(target_order, ratio, dtype, seed=1)
    before = {name: tensor.clone() for name, tensor in there.items()}
    gatherer, scatterer = open_as(kinds[0], here), open_as(kinds[1], there)
    pages = empty_pages(gatherer, count)
    gatherer.gather(0, source[:count], pages, after=None)
    pages.flags.writeable = False
    skipped = count // 2
    scatterer.scatter(0, target[:skipped], pages, num_pages=count, first_page=0, after=None)
    scatterer.scatter(0, target[skipped:count], pages, num_pages=count, first_page=skipped, after=None)

    for name, tensor in there.items():
        blocks, expected = _blocks(tensor, ratio), _blocks(here[name], ratio)
        assert torch.equal(blocks[target[:count]], expected[source[:count]])
        assert torch.equal(blocks[target[count:]], _blocks(before[name], ratio)[target[count:]])


def _blocks(tensor: torch.Tensor, ratio: int) -> torch.Tensor:
    return tensor.reshape(NUM_BLOCKS, ratio, HEADS, TOKENS // ratio, CONTENT)


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_a_page_is_the_same_bytes_in_every_physical_order(order: str) -> None:
    kv = paged("LBHNC", 2, torch.float32)
    same = paged(order, 2, torch.float32, seed=9)
    for name, tensor in same.items():
        tensor.copy_(kv[name])
    expected, pages = (empty_pages(open_all(layers), 4) for layers in (kv, same))
    open_all(kv).gather(0, [7, 1, 2, 9], expected, after=None)
    open_all(same).gather(0, [7, 1, 2, 9], pages, after=None)

    assert np.array_equal(pages, expected)
    assert pages[: len(pages) // 12].tobytes() == kv["layer0"].reshape(NUM_BLOCKS, -1)[7].numpy().tobytes()


def test_many_scattered_blocks_take_the_indexed_way_to_the_same_result() -> None:
    kv = {"layer": torch.arange(40 * HEADS * TOKENS * CONTENT).float().reshape(40, HEADS, TOKENS, CONTENT)}
    ids = [(i * 7) % 40 for i in range(40)]
    layers = open_all(kv, 40)
    pages = empty_pages(layers, 40)
    layers.gather(0, ids, pages, after=None)
    expected = kv["layer"][ids].clone()
    kv["layer"].zero_()
    layers.scatter(0, ids, pages, num_pages=40, first_page=0, after=None)

    assert isinstance(layers, HostLayers)
    assert len(runs(ids)) > 8
    assert torch.equal(kv["layer"][ids], expected)


def test_shapes_name_the_kernels_blocks() -> None:
    ((shape, *_),) = open_all(paged("LBHNC", 4, torch.bfloat16)).shapes

    assert (shape.ratio, shape.heads, shape.kernel_block_tokens, shape.content_bytes) == (4, HEADS, 2, 12)
    assert shape.page_bytes == HEADS * TOKENS * CONTENT * 2


def test_layers_that_share_a_tensor_are_carried_once() -> None:
    kv = paged("LBHNC", 1, torch.float32, layers=2)
    kv["alias"] = kv["layer0"]

    assert [shape.name for shape in open_all(kv).shapes[0]] == ["layer0", "layer1"]


def test_layers_of_two_groups_in_one_memory_are_carried_each_by_its_own_blocks() -> None:
    """vLLM lays layers of different groups over each other; a page is told by its group's block ids alone."""
    (tensor,) = paged("LBHNC", 1, torch.float32, layers=1).values()
    layers = open_layers({"full": tensor, "window": tensor}, NUM_BLOCKS, [["full"], ["window"]])
    pages = [empty_pages(layers, 2, group) for group in (0, 1)]
    for group, ids in enumerate([[1, 2], [5, 6]]):
        layers.gather(group, ids, pages[group], after=None)

    assert pages[0].tobytes() == tensor[[1, 2]].numpy().tobytes()
    assert pages[1].tobytes() == tensor[[5, 6]].numpy().tobytes()


def test_pages_of_several_sizes_and_with_padding_come_back_without_it() -> None:
    padded = torch.rand(NUM_BLOCKS, 2 * 8 * 4 + 32)
    kv = {
        "narrow": padded.as_strided((NUM_BLOCKS, 2, 8, 4), (padded.stride(0), 32, 4, 1)),
        "wide": torch.rand(NUM_BLOCKS, 2, 8, 6),
    }
    layers = open_all(kv)
    pages = empty_pages(layers, 3)
    layers.gather(0, [4, 2, 9], pages, after=None)
    expected = [tensor[[4, 2, 9]].clone() for tensor in kv.values()]
    before = padded.clone()
    for tensor in kv.values():
        tensor.zero_()
    layers.scatter(0, [4, 2, 9], pages, num_pages=3, first_page=0, after=None)

    assert len(pages) == 3 * (2 * 8 * 4 + 2 * 8 * 6) * 4
    assert all(torch.equal(tensor[[4, 2, 9]], held) for tensor, held in zip(kv.values(), expected, strict=True))
    assert torch.equal(padded[:, 64:], before[:, 64:])


@pytest.mark.parametrize(
    "kv",
    [
        {},
        {"a": torch.zeros(NUM_BLOCKS, 2, 8)},
        {"a": torch.zeros(NUM_BLOCKS + 1, 2, 8, 4)},
        {"a": torch.zeros(NUM_BLOCKS, 2, 4, 8).transpose(2, 3)},
        {"a": [torch.zeros(NUM_BLOCKS, 2, 8, 4)]},
    ],
)
def test_layers_we_cannot_carry_are_refused(kv: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UncarriedEngine):
        open_all(kv)


@given(st.lists(st.integers(0, 50), max_size=60))
def test_runs_say_the_ids_again(ids: list[int]) -> None:
    spelled = [ids[start] + step * i for start, length, step in runs(ids) for i in range(length)]

    assert spelled == ids


def test_runs_go_up_and_down() -> None:
    assert runs([4, 5, 6, 9, 8, 7, 1]) == [(0, 3, 1), (3, 3, -1), (6, 1, 1)]
