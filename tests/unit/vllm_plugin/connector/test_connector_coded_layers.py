"""Pages stored in fewer bits: which are, which stay as they are, and that no other block is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import xxhash

from contextcache.model import KVFile, KVKind
from tests.contract.paged_layers_contract import PagedLayersContract
from tests.kit.paged_kv import NUM_BLOCKS, HostKind, Kind, TwinKind
from vllm_plugin.connector.copies.codec import DTYPES, STEPS, CodedLayers, NotFinite
from vllm_plugin.connector.copies.pages import PageCopy, PagedLayers, Pages
from vllm_plugin.connector.metadata import EngineGroup

KINDS = {"host": HostKind(), "registered": TwinKind(registered=True), "staged": TwinKind(registered=False)}
SIZES = [(2, 8, 24), (2, 8, 10)]
"""Heads, tokens and content of two layers: six groups a page, and two and a half."""


@dataclass
class CodedKind(HostKind):
    """Layers of another kind, coded."""

    name: str

    def open(self, kv: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]) -> PagedLayers:
        return CodedLayers(super().open(kv, num_blocks, groups), ["full_attention"] * len(groups), self.name)


class TestPagesThatAreNotFull(PagedLayersContract):
    """Nothing of them is coded: the contract of all kinds."""

    kind = CodedKind("q4")


def kv_of(dtype: torch.dtype, *, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"l{i}": torch.randn(NUM_BLOCKS, *size, generator=generator).to(dtype) for i, size in enumerate(SIZES)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def coded(kind: Kind, kv: Mapping[str, torch.Tensor], name: str, of: KVKind = "full_attention") -> CodedLayers:
    return CodedLayers(kind.open(kv, NUM_BLOCKS, [list(kv)]), [of], name)


def stored(kind: Kind, layers: CodedLayers, ids: list[int], num_full: int) -> Pages:
    """Gather blocks; return a copy of what is stored, after a look at the bytes around it."""
    size = layers.stored(0, len(ids), num_full).size_bytes
    room = kind.room(size + 2)
    room[:] = 0xEE
    layers.gather([PageCopy(0, ids, room[1:-1], len(ids), after=layers.fence(), num_full=num_full)])

    assert room[0] == room[-1] == 0xEE
    return room[1:-1].copy()


def put(kind: Kind, layers: CodedLayers, pages: Pages, ids: list[int], *, num_full: int, first: int = 0) -> str:
    """Scatter over blocks from read-only memory; return the checksum of the file's bytes."""
    room = kind.room(len(pages))
    room[:] = pages
    room.flags.writeable = False
    copy = PageCopy(0, ids, room, first + len(ids), first, layers.fence(), num_full, "checksum")
    [landed] = layers.scatter([copy])
    return landed.checksum


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_pages_come_back_nearly_and_the_last_one_exactly(kind: Kind, name: str, dtype: str) -> None:
    here, there = kv_of(DTYPES[dtype]), kv_of(DTYPES[dtype], seed=1)
    before = {layer: tensor.clone() for layer, tensor in there.items()}
    pages = stored(kind, coded(kind, here, name), [7, 1, 2, 9], 3)
    checksum = put(kind, coded(kind, there, name), pages, [4, 3, 11, 0], num_full=3)

    assert checksum == xxhash.xxh3_128_hexdigest(pages.tobytes())
    others = [block for block in range(NUM_BLOCKS) if block not in {4, 3, 11, 0}]
    for layer, tensor in there.items():
        largest = (tensor[[4, 3, 11]].float() - here[layer][[7, 1, 2]].float()).abs().max()
        assert 0 < largest < 8 / STEPS[name]
        assert torch.equal(tensor[0], here[layer][9])
        assert torch.equal(tensor[others], before[layer][others])


@pytest.mark.parametrize("name", STEPS)
def test_the_last_pages_of_a_file_come_back_alone(kind: Kind, name: str) -> None:
    """What is before a window, or in the engine already, is not written."""
    here, whole, there = (kv_of(torch.bfloat16, seed=seed) for seed in (0, 1, 1))
    pages = stored(kind, coded(kind, here, name), [7, 1, 2, 9], 3)
    put(kind, coded(kind, whole, name), pages, [4, 3, 11, 0], num_full=3)
    for first, ids in ((2, [11, 0]), (3, [5]), (1, [3])):
        moved = [*range(first, first + len(ids))]
        layers = coded(kind, there, name)
        room = kind.room(len(pages))
        room[:] = pages
        layers.scatter([PageCopy(0, ids, room, 4, first, layers.fence(), 3)])

        for layer, tensor in there.items():
            assert torch.equal(tensor[ids], whole[layer][[[4, 3, 11, 0][page] for page in moved]])
    for layer, tensor in there.items():
        assert torch.equal(tensor[4], kv_of(torch.bfloat16, seed=1)[layer][4])


@pytest.mark.parametrize("name", STEPS)
def test_a_context_that_was_restored_is_stored_by_the_same_bytes(kind: Kind, name: str) -> None:
    """Its numbers were coded once, and are not coded another time when the tail they stand in is saved again."""
    here, there = kv_of(torch.bfloat16), kv_of(torch.bfloat16, seed=1)
    pages = stored(kind, coded(kind, here, name), [7, 1, 2, 9], 3)
    put(kind, coded(kind, there, name), pages, [4, 3, 11, 0], num_full=3)

    assert stored(kind, coded(kind, there, name), [4, 3, 11, 0], 3).tobytes() == pages.tobytes()


def test_a_file_takes_what_its_bits_say() -> None:
    """Two layers of 384 and 160 numbers a page: 6 and 3 groups with two ends of two bytes each."""
    kv = kv_of(torch.bfloat16)
    plain = 2 * (384 + 160)

    assert coded(HostKind(), kv, "q8").stored(0, 4, 3).size_bytes == 3 * (384 + 160 + 9 * 4) + plain
    assert coded(HostKind(), kv, "q4").stored(0, 4, 4).size_bytes == 4 * ((384 + 160) // 2 + 9 * 4)
    assert coded(HostKind(), kv, "q4").stored(0, 4, 0).size_bytes == 4 * plain


def test_a_file_says_all_that_a_reader_needs() -> None:
    layers = coded(HostKind(), kv_of(torch.float16), "q8")
    told = {"name": "q8", "dtype": "float16", "group_numbers": 64, "pages": 4, "coded_pages": 3}

    assert json.loads(layers.stored(0, 4, 3).codec) == told | {"layers": [[768, 1], [320, 1]]}
    assert layers.stored(0, 1, 0).codec == ""
    alike = coded(HostKind(), {name: kv_of(torch.bfloat16)["l0"].clone() for name in "abc"}, "q4")
    assert json.loads(alike.stored(0, 1, 1).codec)["layers"] == [[768, 3]]


@pytest.mark.parametrize("name", STEPS)
def test_a_number_without_a_code_is_told_and_not_stored(kind: Kind, name: str) -> None:
    kv = kv_of(torch.bfloat16)
    layers = coded(kind, kv, name)
    kv["l1"][2, 1, 7, 9] = float("nan")

    with pytest.raises(NotFinite):
        stored(kind, layers, [7, 1, 2, 9], 3)
    kept = stored(kind, layers, [7, 1, 9, 2], 3)
    there = kv_of(torch.bfloat16, seed=1)
    put(kind, coded(kind, there, name), kept, [4, 3, 11, 0], num_full=3)
    assert there["l1"][0, 1, 7].isnan().tolist() == [False] * 9 + [True]


@pytest.mark.parametrize(
    ("of", "dtype", "reason"),
    [("state", torch.float32, "state"), ("full_attention", torch.uint8, "dtype"), ("state", torch.uint8, "state")],
)
def test_what_cannot_be_coded_stays_as_it_is_by_name(of: KVKind, dtype: torch.dtype, reason: str) -> None:
    kv = {"l": torch.randint(0, 200, (NUM_BLOCKS, 2, 8, 16)).to(dtype)}
    layers = coded(HostKind(), kv, "q8", of)
    page_bytes = 256 * dtype.itemsize

    assert (layers.uncoded, layers.facts) == ([reason], {})
    assert layers.stored(0, 2, 2) == (2 * page_bytes, "")
    assert stored(HostKind(), layers, [3, 4], 2).tobytes() == kv["l"][[3, 4]].numpy().tobytes()


def test_a_group_of_several_types_stays_as_it_is() -> None:
    kv = {"a": torch.zeros(NUM_BLOCKS, 2, 8, 16), "b": torch.zeros(NUM_BLOCKS, 2, 8, 16, dtype=torch.bfloat16)}

    assert coded(HostKind(), kv, "q8").uncoded == ["dtype"]


def test_beside_a_group_of_states_attention_is_coded() -> None:
    kv = kv_of(torch.bfloat16)
    layers = CodedLayers(HostKind().open(kv, NUM_BLOCKS, [["l0"], ["l1"]]), ["state", "sliding_window"], "q4")

    assert (layers.uncoded, layers.facts) == (["state"], {"codec": [("q4", 64)]})
    assert (layers.stored(0, 1, 1).codec, json.loads(layers.stored(1, 1, 1).codec)["layers"]) == ("", [[320, 1]])


def test_several_threads_code_different_blocks_at_once(kind: Kind) -> None:
    here, there = kv_of(torch.bfloat16), kv_of(torch.bfloat16, seed=1)
    source, target = coded(kind, here, "q8"), coded(kind, there, "q8")
    size = source.stored(0, 3, 3).size_bytes
    room = kind.room(4 * size)
    parts = [(list(range(3 * i, 3 * i + 3)), room[i * size : (i + 1) * size]) for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda part: source.gather([PageCopy(0, *part, 3, num_full=3)]), parts))
        list(threads.map(lambda part: target.scatter([PageCopy(0, *part, 3, num_full=3)]), parts))

    assert all((there[layer].float() - here[layer].float()).abs().max() < 8 / STEPS["q8"] for layer in here)


@pytest.mark.parametrize(
    ("kind_of", "first", "end", "full"),
    [
        ("full_attention", 0, 256, 16),
        ("full_attention", 256, 300, 2),
        ("full_attention", 256, 271, 0),
        ("sliding_window", 208, 256, 3),
        ("sliding_window", 200, 256, 0),
        ("state", 255, 256, 0),
    ],
)
def test_pages_are_full_that_have_a_token_in_every_slot(kind_of: KVKind, first: int, end: int, full: int) -> None:
    group = EngineGroup(kind_of, 16, 40 if kind_of == "sliding_window" else 0)

    assert group.num_full(KVFile(0, "tail", "ref", "", first, end)) == full
