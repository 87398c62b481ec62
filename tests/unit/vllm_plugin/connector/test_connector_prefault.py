"""KV memory is touched without being changed."""

import threading

import torch

from vllm_plugin.connector.copies.layout import prefault


def test_every_whole_page_is_touched_once_and_no_byte_changes():
    storage = torch.arange(1 << 20, dtype=torch.int32)
    before = storage.clone()

    touched_bytes = prefault([storage, storage[: 1 << 19]], stopping=threading.Event())

    assert storage.nbytes - 2 * 4096 <= touched_bytes <= storage.nbytes
    assert torch.equal(storage, before)


def test_nothing_is_touched_once_the_engine_stops():
    stopping = threading.Event()
    stopping.set()

    assert prefault([torch.zeros(1 << 20)], stopping=stopping) == 0
