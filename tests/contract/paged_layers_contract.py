"""What every PagedLayers promises, wherever its KV is. A subclass names its kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.kit.digests import digests_of
from tests.kit.paged_kv import CONTENT, HEADS, NUM_BLOCKS, ORDERS, TOKENS, HostKind, Kind, empty_pages, equal, paged
from vllm_plugin.connector.copies.pages import Landed, PageCopy, PagedLayers, Pages, page_bytes

HOST = HostKind()
GUARD = 0xEE


def blocks(tensor: torch.Tensor, ratio: int) -> torch.Tensor:
    """Return `[B, ratio, H, N, C]` on the CPU."""
    return tensor.cpu().reshape(NUM_BLOCKS, ratio, HEADS, TOKENS // ratio, CONTENT)


def as_they_lie(tensor: torch.Tensor, block_ids: list[int], ratio: int) -> bytes:
    """Return the bytes of a layer's blocks in the order of their addresses: what a page is, said in another way."""
    view = tensor.unflatten(0, (NUM_BLOCKS, ratio))[block_ids[0]]
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    in_order = blocks(tensor, ratio)[block_ids].flatten(1)[:, offsets.flatten().argsort()]
    return in_order.contiguous().view(torch.uint8).numpy().tobytes()


def by_block(layers: list[bytes], num_blocks: int) -> bytes:
    """Return the bytes of several layers' blocks block by block."""
    rows = [np.frombuffer(layer, dtype=np.uint8).reshape(num_blocks, -1) for layer in layers]
    return np.concatenate(rows, axis=1).tobytes()


class PagedLayersContract:
    """Subclass it with a `kind`."""

    kind: ClassVar[Kind]

    def opened(self, kv: dict[str, torch.Tensor], groups: list[list[str]] | None = None) -> PagedLayers:
        return self.kind.open(kv, NUM_BLOCKS, groups or [list(kv)])

    def gathered(self, layers: PagedLayers, block_ids: list[int], group: int = 0) -> Pages:
        """Return pages, after a look at the bytes around them."""
        room = self.kind.room(len(block_ids) * page_bytes(layers.shapes[group]) + 2)
        room[:] = GUARD
        layers.gather([PageCopy(group, block_ids, room[1:-1], len(block_ids), after=layers.fence())])

        assert room[0] == room[-1] == GUARD
        return room[1:-1]

    def scattered(self, layers: PagedLayers, pages: Pages, block_ids: list[int], *, first: int) -> Landed:
        """Write the pages from `first` on over blocks; return the proof."""
        room = self.kind.room(len(pages))
        room[:] = pages
        room.flags.writeable = False  # as a file's bytes
        num_pages, proof = len(pages) // page_bytes(layers.shapes[0]), "digests" if layers.makes_digests else "checksum"
        [landed] = layers.scatter([PageCopy(0, block_ids, room, num_pages, first, layers.fence(), proof=proof)])
        return landed

    @settings(suppress_health_check=[HealthCheck.differing_executors])  # each kind is a test of its own
    @given(
        order=st.sampled_from(sorted(ORDERS)),
        ratio=st.sampled_from([1, 2, 4]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
        source=st.permutations(range(NUM_BLOCKS)),
        target=st.permutations(range(NUM_BLOCKS)),
        count=st.integers(1, NUM_BLOCKS),
        skipped=st.integers(0, NUM_BLOCKS),
    )
    @example(  # blocks of nothing are a list of blocks all the same
        order="BHLNC", ratio=1, dtype=torch.float32, source=[*range(12)], target=[*range(12)], count=1, skipped=1
    )
    def test_pages_of_one_engine_go_into_blocks_of_another_bit_by_bit(
        self,
        order: str,
        ratio: int,
        dtype: torch.dtype,
        source: list[int],
        target: list[int],
        count: int,
        skipped: int,
    ) -> None:
        """Pages before the first that moves stay out; blocks that are not named stay as they were."""
        here = paged(order, ratio, dtype, place=self.kind.place)
        there = paged(order, ratio, dtype, seed=1, place=self.kind.place)
        before = {name: blocks(tensor, ratio).clone() for name, tensor in there.items()}
        source, skipped = source[:count], min(skipped, count)
        moved, kept = target[skipped:count], target[:skipped] + target[count:]
        layers = self.opened(here)
        pages = self.gathered(layers, source).copy()
        landed = self.scattered(self.opened(there), pages, moved, first=skipped)

        own = [as_they_lie(tensor.cpu(), source, ratio) for tensor in here.values()]
        assert pages.tobytes() == (b"".join(own) if len(layers.planes[0]) > 1 else by_block(own, count))
        if layers.makes_digests:
            assert landed.digests == digests_of(layers.planes[0], pages, count)[skipped:]
        else:
            assert landed.checksum == xxhash.xxh3_128_hexdigest(pages.tobytes())
        for name, tensor in there.items():
            assert torch.equal(blocks(tensor, ratio)[moved], blocks(here[name], ratio)[source[skipped:]])
            assert torch.equal(blocks(tensor, ratio)[kept], before[name][kept])

    @pytest.mark.parametrize("order", sorted(ORDERS))
    @pytest.mark.parametrize("ratio", [1, 4])
    def test_pages_are_those_of_an_engine_in_host_memory(self, order: str, ratio: int) -> None:
        kv = paged(order, ratio, place=HOST.place)
        layers = self.opened(paged(order, ratio, place=self.kind.place))
        on_host = HOST.open(kv, NUM_BLOCKS, [list(kv)])
        expected = empty_pages(on_host, 4)
        on_host.gather([PageCopy(0, [7, 1, 2, 9], expected, 4)])

        assert layers.shapes == on_host.shapes
        assert np.array_equal(self.gathered(layers, [7, 1, 2, 9]), expected)

    def test_layers_of_two_groups_in_one_memory_are_copied_each_by_its_own_blocks(self) -> None:
        """vLLM lays layers of different groups over each other; a page is told by its group's block ids alone."""
        (tensor,) = paged("LBHNC", layers=1, place=self.kind.place).values()
        layers = self.opened({"full": tensor, "window": tensor}, [["full"], ["window"]])
        first = self.gathered(layers, [1, 2], 0).tobytes()
        second = self.gathered(layers, [5, 6], 1).tobytes()

        assert first == tensor.cpu()[[1, 2]].numpy().tobytes()
        assert second == tensor.cpu()[[5, 6]].numpy().tobytes()

    def test_pages_of_several_sizes_and_with_padding_come_back_without_it(self) -> None:
        padded = self.kind.place(torch.rand(NUM_BLOCKS, 2 * 8 * 4 + 32))
        kv = {
            "narrow": padded.as_strided((NUM_BLOCKS, 2, 8, 4), (padded.stride(0), 32, 4, 1)),
            "wide": self.kind.place(torch.rand(NUM_BLOCKS, 2, 8, 6)),
        }
        layers, before = self.opened(kv), padded.cpu().clone()
        expected = [tensor.cpu()[[4, 2, 9]].clone() for tensor in kv.values()]
        pages = self.gathered(layers, [4, 2, 9]).copy()
        for tensor in kv.values():
            tensor.zero_()
        self.scattered(layers, pages, [4, 2, 9], first=0)

        assert len(pages) == 3 * (2 * 8 * 4 + 2 * 8 * 6) * 4
        assert equal((tensor.cpu()[[4, 2, 9]] for tensor in kv.values()), expected)
        assert torch.equal(padded.cpu()[:, 64:], before[:, 64:])

    def test_a_file_of_a_window_brings_its_last_pages_alone(self) -> None:
        kv = paged("LBNHC", 2, place=self.kind.place)
        layers = self.opened(kv)
        pages = self.gathered(layers, [3, 4, 5, 6, 7]).copy()
        self.scattered(layers, pages, [10, 0], first=3)

        for tensor in kv.values():
            assert torch.equal(blocks(tensor, 2)[[10, 0]], blocks(tensor, 2)[[6, 7]])

    def test_several_files_of_several_groups_come_in_one_call(self) -> None:
        (tensor,) = paged("LBHNC", layers=1, place=self.kind.place).values()
        layers, before = self.opened({"full": tensor, "window": tensor}, [["full"], ["window"]]), tensor.cpu().clone()
        size = page_bytes(layers.shapes[0])
        room = self.kind.room(6 * size)
        parts = [(1, [1, 2]), (0, [9]), (1, [4, 3, 7])]
        stretches = [room[: 2 * size], room[2 * size : 3 * size], room[3 * size :]]
        copies = [
            PageCopy(group, ids, pages, len(ids), after=layers.fence(), proof="digests")
            for (group, ids), pages in zip(parts, stretches, strict=True)
        ]
        digests = layers.gather(copies)
        tensor.zero_()
        landed = layers.scatter(copies)

        assert torch.equal(tensor.cpu()[[1, 2, 9, 4, 3, 7]], before[[1, 2, 9, 4, 3, 7]])
        if layers.makes_digests:
            assert digests == [proof.digests for proof in landed]
            assert digests == [digests_of([size], pages, len(pages) // size) for pages in stretches]

    def test_several_threads_copy_different_blocks_at_once(self) -> None:
        kv = paged("LBHNC", place=self.kind.place)
        layers = self.opened(kv)
        expected = {name: tensor.cpu().roll(-3, 0) for name, tensor in kv.items()}
        size = 3 * page_bytes(layers.shapes[0])
        room = self.kind.room(4 * size)
        parts = [(list(range(3 * i, 3 * i + 3)), room[i * size : (i + 1) * size]) for i in range(4)]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda part: layers.gather([PageCopy(0, *part, 3, after=layers.fence())]), parts))
            moved = [([(i - 3) % NUM_BLOCKS for i in ids], pages) for ids, pages in parts]
            list(threads.map(lambda part: layers.scatter([PageCopy(0, *part, 3, after=layers.fence())]), moved))

        assert equal(kv.values(), expected.values())
