"""Numbers in fewer bits: what comes back, how far it may be off, and what is refused."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_plugin.connector.copies.codec import DTYPES, GROUP_NUMBERS, STEPS, TINY, NotFinite, PageCodec, Rows
from vllm_plugin.connector.settings import _CHOICES, CODEC_NONE

BITS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}
ALL = [pytest.param(name, dtype, id=f"{name} {dtype}") for name, dtype in product(STEPS, DTYPES)]
TASKS = Path("/proc/self/task")
"""This process's threads, those of no interpreter too."""
all_codecs = pytest.mark.parametrize(("name", "dtype"), ALL)


def codec_of(name: str, numbers: torch.Tensor) -> PageCodec:
    dtype = str(numbers.dtype).removeprefix("torch.")
    return PageCodec(name, dtype, numbers.shape[1] * numbers.element_size())


def encoded(name: str, numbers: torch.Tensor) -> Rows:
    """Code pages `[pages, numbers]`; what lies behind a page's bytes is looked at."""
    codec = codec_of(name, numbers)
    room = np.full((len(numbers), codec.coded_bytes + 1), 0xEE, dtype=np.uint8)
    codec.encode(numbers.contiguous().view(torch.uint8).numpy(), room[:, :-1])

    assert (room[:, -1] == 0xEE).all()
    return room[:, :-1]


def decoded(name: str, coded: Rows, like: torch.Tensor) -> torch.Tensor:
    """Bring pages back from read-only memory."""
    coded, found = coded.copy(), torch.zeros_like(like)
    coded.flags.writeable = False
    codec_of(name, like).decode(coded, found.view(torch.uint8).numpy())
    return found


def there_and_back(name: str, numbers: torch.Tensor) -> torch.Tensor:
    return decoded(name, encoded(name, numbers), numbers)


def assert_within_half_a_step(name: str, numbers: torch.Tensor, found: torch.Tensor) -> None:
    """No number is further off than half a step of its group and a rounding to its type."""
    for part, back in zip(numbers.split(GROUP_NUMBERS, 1), found.split(GROUP_NUMBERS, 1), strict=True):
        exact = part.double()
        step = (exact.amax(1) - exact.amin(1)) / STEPS[name]
        rounding = torch.finfo(numbers.dtype).eps * exact.abs().amax(1) + torch.finfo(numbers.dtype).smallest_normal
        assert bool(((back.double() - exact).abs() <= (0.5001 * step + rounding)[:, None] + 2 * TINY).all())


@all_codecs
def test_numbers_come_back_within_half_a_step_whatever_the_size_of_a_page(name: str, dtype: str) -> None:
    for size in (1, 2, 63, 64, 65, 191, 4096, 32_768, 33_000, 65_536):
        generator = torch.Generator().manual_seed(size)
        numbers = (torch.randn(3, size, generator=generator) * torch.tensor([[1e-3], [1.0], [30.0]])).to(DTYPES[dtype])
        found = there_and_back(name, numbers)

        assert_within_half_a_step(name, numbers, found)
        assert size < 3 or not torch.equal(found, numbers), "nothing was lost: nothing was coded"


@all_codecs
def test_a_coded_page_has_the_bytes_that_its_codec_says(name: str, dtype: str) -> None:
    item_bytes = DTYPES[dtype].itemsize
    code_bits = {"q8": 8, "q4": 4}[name]

    assert PageCodec(name, dtype, 640 * item_bytes).coded_bytes == 640 * code_bits // 8 + 10 * 2 * item_bytes
    assert PageCodec(name, dtype, 65 * item_bytes).coded_bytes == 64 * code_bits // 8 + 1 + 2 * 2 * item_bytes


@all_codecs
def test_the_ends_of_a_group_come_back_exactly(name: str, dtype: str) -> None:
    """Seen failing with numbers counted from the smallest: an end near zero came back as another number."""
    numbers = torch.randn(5, 640, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    numbers[0, :64] = -numbers[0, :64].abs()
    numbers[0, :2] = torch.tensor([-1000.0, 1.2e-7])
    found = there_and_back(name, numbers)

    for part, back in zip(numbers.split(64, 1), found.split(64, 1), strict=True):
        assert torch.equal(part.amax(1), back.amax(1))
        assert torch.equal(part.amin(1), back.amin(1))


@all_codecs
@pytest.mark.parametrize("value", [0.0, -3.0, 1.5])
def test_a_group_of_one_value_comes_back_exactly(name: str, dtype: str, value: float) -> None:
    numbers = torch.full((2, 130), value, dtype=DTYPES[dtype])

    assert torch.equal(there_and_back(name, numbers), numbers)


@all_codecs
def test_a_number_far_from_its_neighbours_spoils_its_own_group_alone(name: str, dtype: str) -> None:
    numbers = torch.randn(1, 192, generator=torch.Generator().manual_seed(2)).to(DTYPES[dtype])
    spoilt = numbers.clone()
    spoilt[0, 70] = 60_000.0

    found, other = there_and_back(name, spoilt), there_and_back(name, numbers)

    assert torch.equal(found[0, :64], other[0, :64])
    assert torch.equal(found[0, 128:], other[0, 128:])


@st.composite
def pages(draw: st.DrawFn) -> torch.Tensor:
    """Any bits at all, denormal numbers among them; nothing infinite, no NaN, nothing so far apart."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    bits = 32 if dtype == "float32" else 16
    values = draw(st.lists(st.integers(-(1 << bits - 1), (1 << bits - 1) - 1), min_size=1, max_size=70))
    if draw(st.booleans()):  # neighbours in the type: steps finer than what lies between them
        values = [values[0] ^ (value & 15) for value in values]
    numbers = torch.tensor([values], dtype=BITS[dtype]).view(DTYPES[dtype])
    return torch.where(numbers.float().abs() < torch.finfo(DTYPES[dtype]).max / 4, numbers, torch.zeros_like(numbers))


@given(name=st.sampled_from(sorted(STEPS)), numbers=pages())
def test_any_numbers_come_back_within_half_a_step_and_stay_as_they_are_from_then_on(
    name: str, numbers: torch.Tensor
) -> None:
    once = there_and_back(name, numbers)
    again = there_and_back(name, once)

    assert_within_half_a_step(name, numbers, once)
    assert torch.equal(once, again)


@all_codecs
def test_what_was_coded_once_has_the_same_bytes_when_it_is_coded_again(name: str, dtype: str) -> None:
    numbers = (torch.randn(8, 4096, generator=torch.Generator().manual_seed(3)) + 0.5).to(DTYPES[dtype])
    coded = encoded(name, numbers)

    assert np.array_equal(encoded(name, decoded(name, coded, numbers)), coded)


@all_codecs
def test_numbers_that_have_no_code_are_refused(name: str, dtype: str) -> None:
    for what, place in product(["nan", "inf", "-inf"], [0, 100, 129]):
        numbers = torch.ones(2, 131, dtype=DTYPES[dtype])
        numbers[1, place] = float(what)

        with pytest.raises(NotFinite):
            encoded(name, numbers)


@pytest.mark.parametrize("name", STEPS)
def test_numbers_too_far_apart_for_their_type_are_refused(name: str) -> None:
    numbers = torch.tensor([[3e38, -3e38]], dtype=torch.bfloat16)

    with pytest.raises(NotFinite):
        encoded(name, numbers)


@all_codecs
def test_coding_stays_in_the_thread_that_calls(name: str, dtype: str) -> None:
    """Other cores are the engine's. Seen failing with torch's `round_`, which calls threads for 32 768 numbers."""
    before_threads = torch.get_num_threads()
    numbers = torch.randn(4, 65_536).to(DTYPES[dtype])
    rows, codec = numbers.view(torch.uint8).numpy(), codec_of(name, numbers)
    coded = np.empty((4, codec.coded_bytes), dtype=np.uint8)
    found: list[int] = []

    def code() -> None:
        before = len([*TASKS.iterdir()])
        codec.encode(rows, coded)
        codec.decode(coded, rows)
        found.append(len([*TASKS.iterdir()]) - before)

    torch.set_num_threads(4)
    thread = threading.Thread(target=code)
    thread.start()
    thread.join()
    torch.set_num_threads(before_threads)

    assert found == [0]


def test_the_settings_name_every_codec() -> None:
    assert {CODEC_NONE, *STEPS} == set(_CHOICES["codec"])
