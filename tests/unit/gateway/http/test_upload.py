"""A body has its time: a slow line is waited for, a trickle is not."""

import asyncio

import pytest

from contextcache.clock import SystemClock
from contextcache.errors import ContextCacheError, UploadTooSlow
from gateway.http.exchange import Exchange
from gateway.tenants.limits import FrontLimits, HeldBody, TenantLimits

MIB = 1 << 20


def exchange_of(*pieces, every_s):
    """A request whose body comes in these pieces, one each `every_s` seconds, and then is silent."""
    left = list(pieces)

    async def receive():
        await asyncio.sleep(every_s)
        if not left:
            await asyncio.Event().wait()
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message):
        raise AssertionError(message)

    return Exchange({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)


async def read(exchange):
    tenants = TenantLimits(clock=SystemClock())
    with HeldBody(tenants, "demo", FrontLimits(max_body_bytes=32 * MIB, body_timeout_s=60)) as held:
        body = await exchange.read_body(held)
    assert tenants.held_bytes == 0
    return len(body)


@pytest.mark.looptime
async def test_a_trickle_is_408_however_regular(looptime):
    """Seen failing before: each byte was in time, and the body took as long as it liked."""
    with pytest.raises(UploadTooSlow) as caught:
        await read(exchange_of(*[b"x"] * 10_000, every_s=5))

    assert (caught.value.http_status, caught.value.code) == (408, "upload_too_slow")
    assert 60 <= looptime < 61


@pytest.mark.looptime
@pytest.mark.parametrize("every_s", [1, 30])
async def test_the_largest_body_over_a_slow_line_arrives(looptime, every_s):
    pieces = [b"x" * MIB] * 32

    assert await read(exchange_of(*pieces, every_s=every_s)) == 32 * MIB
    assert looptime == 32 * every_s


@pytest.mark.looptime
async def test_a_body_that_is_refused_is_read_to_its_end_and_no_longer_than_any():
    """Seen failing before: the proxy broke the connection of a client that was still sending, and it saw no answer."""
    for pieces, waited_s in (([b"x" * 10] * 4, 20), ([b"x" * 40], 5), ([b"x"] * 10_000, 60)):
        tenants = TenantLimits(clock=SystemClock(), total_bytes_max=2)
        started_s = asyncio.get_running_loop().time()
        with (
            HeldBody(tenants, "demo", FrontLimits(body_timeout_s=60)) as held,
            pytest.raises(ContextCacheError) as caught,
        ):
            await exchange_of(*pieces, every_s=5).read_body(held)

        assert caught.value.code in {"no_ready_endpoint", "too_many_in_flight"}
        assert asyncio.get_running_loop().time() - started_s == pytest.approx(waited_s, abs=1)
        assert tenants.held_bytes == 0


@pytest.mark.looptime
async def test_what_came_fast_earns_no_long_silence(looptime):
    """The first piece has earned 256 seconds, and 60 are all that it gets."""
    exchange = exchange_of(b"x" * 8 * MIB, b"", every_s=1)
    rest = exchange.receive

    async def receive():
        if looptime >= 1:
            await asyncio.Event().wait()
        return await rest()

    exchange.receive = receive
    with pytest.raises(UploadTooSlow):
        await read(exchange)

    assert looptime == 61
