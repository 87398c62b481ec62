"""Large bodies are read beside the loop, one at a time."""

import asyncio
import threading

import pytest

from contextcache.requests import LARGE_BYTES, LargeBodies
from tests.kit.until import until

LARGE = b"x" * (LARGE_BYTES + 1)


async def test_a_small_body_is_read_at_once_and_a_large_one_in_another_thread():
    bodies = LargeBodies()
    here = threading.get_ident()

    assert await bodies.read(lambda _: threading.get_ident(), LARGE[1:]) == here
    assert await bodies.read(lambda _: threading.get_ident(), LARGE) != here


async def test_the_loop_turns_while_one_is_read_and_no_two_are_read_at_once():
    bodies, go_on = LargeBodies(), threading.Event()
    reading: list[int] = []
    most = 0

    def read(body):
        nonlocal most
        reading.append(1)
        most = max(most, len(reading))
        go_on.wait(5)
        reading.pop()
        return len(body)

    all_read = asyncio.gather(*(bodies.read(read, LARGE) for _ in range(5)))
    await until(lambda: reading, what="one is read", interval_s=0)
    go_on.set()

    assert await all_read == [len(LARGE)] * 5
    assert most == 1


async def test_what_reading_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        await LargeBodies().read(lambda body: len(body) // 0, LARGE)
