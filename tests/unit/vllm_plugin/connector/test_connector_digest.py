"""The digest of a page: one definition, by numpy, by torch and by the kernel that Triton interprets here."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.digests import digests_of
from vllm_plugin.connector.copies.digest import page_digests

BY_KERNEL = """
import torch
from vllm_plugin.connector.copies.digest import page_digests
from vllm_plugin.connector.copies.digest_kernel import page_digests_by_kernel

generator = torch.Generator().manual_seed(7)
for shapes in ([(6, 8)], [(6, 2, 40_000), (6, 16)], [(6, 13)], [(6, 4, 8), (6, 7)]):
    planes = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]
    ids = torch.tensor([4, 0, 5])
    assert torch.equal(page_digests_by_kernel(planes, ids), page_digests(planes, ids)), shapes
padded = torch.randint(0, 256, (6, 96), dtype=torch.uint8, generator=generator)[:, :64]
assert torch.equal(page_digests_by_kernel([padded], ids), page_digests([padded], ids))
print("equal")
"""


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    ids=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_numpy_and_torch_make_the_same_digests_of_any_pages(sizes: list[int], ids: list[int], seed: int) -> None:
    source = np.random.default_rng(seed)
    planes = [source.integers(0, 256, (5, size), dtype=np.uint8) for size in sizes]
    pages = np.concatenate([plane[ids].ravel() for plane in planes])
    found = page_digests([torch.from_numpy(plane) for plane in planes], torch.tensor(ids))

    assert tuple(found.numpy().view(np.uint64).tolist()) == digests_of(sizes, pages, len(ids))


def test_the_kernel_makes_the_same_digests() -> None:
    """In a process of its own: Triton reads the variable when the kernel is made. Seen failing with a shift too few."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", BY_KERNEL], env=environment, capture_output=True, text=True, timeout=120, check=False
    )

    assert run.stdout.strip().endswith("equal"), run.stderr


def test_a_digest_is_the_one_that_is_written_down() -> None:
    """Stored files have it: another definition would make every one of them a miss."""
    page = torch.arange(24, dtype=torch.uint8).view(1, 24)

    assert page_digests([page], torch.tensor([0])).numpy().view(np.uint64).tolist() == [0x3078362FA531AFCC]
