"""Waiting in tests: it returns what it saw, says what it waited for, and hides no other error."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.until import until, wait_until


async def until_in_thread(look, **how):
    return await asyncio.to_thread(wait_until, look, **how)


WAYS = pytest.mark.parametrize("wait", [until, until_in_thread])


@WAYS
async def test_the_first_thing_that_is_so_is_returned(wait):
    seen = iter([1, 2, 3])

    assert await wait(lambda: next(seen), is_so=lambda number: number > 1, what="two", interval_s=0) == 2


@WAYS
async def test_at_the_deadline_it_says_what_it_waited_for_and_what_it_saw_last(wait):
    with pytest.raises(AssertionError, match=r"^not within 0\.05 s: three; seen last: 2$"):
        await wait(lambda: 2, is_so=lambda number: number == 3, what="three", deadline_s=0.05, interval_s=0.001)


@WAYS
async def test_a_named_error_means_not_yet_and_another_ends_the_waiting(wait):
    errors = [OSError("away"), KeyError("wrong")]

    def look():
        raise errors.pop(0)

    with pytest.raises(KeyError, match="wrong"):
        await wait(look, despite=(OSError,), what="an answer", interval_s=0)
    assert errors == []


async def test_a_look_that_hangs_ends_at_the_deadline():
    with pytest.raises(AssertionError, match="an answer; seen last: 'nothing'"):
        await until(lambda: asyncio.sleep(600), what="an answer", deadline_s=0.05)


async def test_a_time_out_of_the_look_itself_is_not_taken_for_the_deadline():
    async def look():
        raise TimeoutError("the look's own")

    with pytest.raises(TimeoutError, match="the look's own"):
        await until(look, what="an answer")
