"""A client of the whole HTTP front without pods and without a socket. It compares each answer with the API document."""

import httpx
import pytest

from gateway.http.app import HttpFront
from tests.kit.api_document import check_answer
from tests.kit.gateway_parts import KEY, OTHER_KEY

AUTH = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
async def client(parts):
    front = HttpFront(parts.gateway, carrier=None)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(front),
        base_url="http://gateway",
        headers=AUTH,
        event_hooks={"response": [check_answer]},
    ) as client:
        yield client


@pytest.fixture
def other():
    """Headers of another tenant."""
    return {"authorization": f"Bearer {OTHER_KEY}"}
