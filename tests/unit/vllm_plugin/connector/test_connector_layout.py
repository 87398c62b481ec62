"""What vLLM registers, told as layers with pages: their sizes, their order, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.kit.paged_kv import CONTENT, HEADS, NUM_BLOCKS, ORDERS, TOKENS, HostKind, empty_pages, paged
from vllm_plugin.connector.copies.cpu_copies import HostLayers
from vllm_plugin.connector.copies.layout import layer_views, open_layers
from vllm_plugin.connector.copies.pages import PageCopy, PagedLayers, page_orders
from vllm_plugin.connector.engine_check import UncarriedEngine

HOST = HostKind()


def open_all(kv: dict[str, torch.Tensor], num_blocks: int = NUM_BLOCKS) -> PagedLayers:
    """All in one group."""
    return open_layers(kv, num_blocks, [list(kv)])


def orders_of(order: str, *, heads: int = HEADS) -> list[str]:
    kv = {name: tensor[:, :heads] for name, tensor in paged(order, 2, place=HOST.place).items()}
    ((*shapes,),), _ = layer_views(kv, NUM_BLOCKS, [list(kv)])
    return [shape.order for shape in shapes]


def test_many_scattered_blocks_come_back() -> None:
    kv = {"layer": torch.arange(40 * HEADS * TOKENS * CONTENT).float().reshape(40, HEADS, TOKENS, CONTENT)}
    ids = [(i * 7) % 40 for i in range(40)]
    layers = open_all(kv, 40)
    pages = empty_pages(layers, 40)
    layers.gather([PageCopy(0, ids, pages, 40)])
    expected = kv["layer"][ids].clone()
    kv["layer"].zero_()
    layers.scatter([PageCopy(0, ids, pages, 40)])

    assert isinstance(layers, HostLayers)
    assert torch.equal(kv["layer"][ids], expected)


@pytest.mark.parametrize("starts", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 4, 5), (0, 3, 1, 2), (5,)])
def test_layers_are_copied_and_nothing_between_them(starts: tuple[int, ...]) -> None:
    """Seen failing with a distance taken from the first two layers alone."""
    memory = torch.zeros(6, NUM_BLOCKS, HEADS, TOKENS, CONTENT)
    layers = open_all({f"layer.{start}": memory[start] for start in starts})
    assert isinstance(layers, HostLayers)
    pages = empty_pages(layers, 2)
    pages[:] = [1 + index % 251 for index in range(len(pages))]
    layers.scatter([PageCopy(0, [5, 1], pages, 2)])
    again = empty_pages(layers, 2)
    layers.gather([PageCopy(0, [5, 1], again, 2)])

    assert (again == pages).all()
    for number, start in enumerate(starts):
        own = pages.reshape(len(starts), 2, -1)[number]
        assert memory[start, 5].numpy().tobytes() == own[0].tobytes()
        assert memory[start, 1].numpy().tobytes() == own[1].tobytes()
    touched = memory.flatten(2).view(torch.uint8).any(dim=2)
    assert touched.sum() == 2 * len(starts)


def test_shapes_name_the_kernels_blocks() -> None:
    ((shape, *_),) = open_all(paged("LBHNC", 4, torch.bfloat16, place=HOST.place)).shapes

    assert (shape.ratio, shape.heads, shape.kernel_block_tokens, shape.content_bytes) == (4, HEADS, 2, 12)
    assert shape.page_bytes == HEADS * TOKENS * CONTENT * 2


@pytest.mark.parametrize(
    ("order", "axes"),
    {"LBHNC": "RHNC", "BLHNC": "RHNC", "LBNHC": "RNHC", "BLNHC": "RNHC", "LHBNC": "HRNC", "BHLNC": "RHNC"}.items(),
)
def test_a_page_has_the_order_of_its_memory(order: str, axes: str) -> None:
    assert orders_of(order) == [axes] * 3


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_one_head_has_one_order(order: str) -> None:
    """Whatever the strides say of an axis of length 1, the bytes are the same, and so must the fingerprint be."""
    assert orders_of(order, heads=1) == ["RHNC"] * 3


def test_the_fingerprint_tells_another_order_than_the_logical_one_and_nothing_of_that() -> None:
    assert page_orders(open_all(paged("LBHNC", place=HOST.place))) == {}
    assert page_orders(open_all(paged("LBNHC", place=HOST.place))) == {"page_orders": ["RNHC"] * 3}


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC"])
def test_layers_that_lie_side_by_side_in_each_block_are_one_plane(order: str) -> None:
    """Seen failing with pages layer by layer: a block of an 8B model is 32 copies instead of one."""
    layers = open_all(paged(order, place=HOST.place))
    page = layers.shapes[0][0].page_bytes

    assert layers.planes == ((3 * page,),)
    assert page_orders(layers)["planes"] == layers.planes
    assert open_all(paged("LBHNC", place=HOST.place)).planes == ((page, page, page),)
    assert open_all(paged("BHLNC", place=HOST.place)).planes == ((page, page, page),)


def test_layers_that_share_a_tensor_are_carried_once() -> None:
    kv = paged("LBHNC", layers=2, place=HOST.place)
    kv["alias"] = kv["layer0"]

    assert [shape.name for shape in open_all(kv).shapes[0]] == ["layer0", "layer1"]


@pytest.mark.parametrize(
    "kv",
    [
        {},
        {"a": torch.zeros(NUM_BLOCKS, 2, 8)},
        {"a": torch.zeros(NUM_BLOCKS + 1, 2, 8, 4)},
        {"a": torch.zeros(NUM_BLOCKS, 2, 4, 8).transpose(2, 3)},
        {"a": [torch.zeros(NUM_BLOCKS, 2, 8, 4)]},
        {"a": torch.zeros(NUM_BLOCKS, 2, 8, 4, device="meta")},
        {"a": torch.zeros(NUM_BLOCKS, 2, 8, 4), "b": torch.zeros(NUM_BLOCKS, 2, 8, 4, device="meta")},
    ],
)
def test_layers_we_cannot_carry_are_refused(kv: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UncarriedEngine):
        open_all(kv)
