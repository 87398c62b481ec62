"""Compaction over real vLLM, by OpenAI's own client: the first response afterwards is warm, also after a loss."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.kit.caller import Caller
from tests.kit.stack import MODEL, Stack

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")]

RULES = " ".join(f"Rule {number}: be brief and exact." for number in range(150))
PLACES = " ".join(f"Gauge {number} stood at {7 * number % 1000} metres." for number in range(60))
SHORT = {"max_output_tokens": 64}
NEW = {"role": "user", "content": "Which gauge stood highest?"}


def responded(client: openai.OpenAI, compacted: Any, **more: Any) -> Any:
    fields = {"model": MODEL, "instructions": RULES, "temperature": 0, "max_output_tokens": 8}
    return client.responses.create(input=[*compacted.output, NEW], store=False, **fields, **more)


@pytest.mark.parametrize("stored", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_first_response_after_a_compaction_is_warm_before_and_after_a_loss(
    client: Caller, stack: Stack, stored: bool
) -> None:
    """Engine and sidecar are killed (-9) after the compaction. The tiers of the disk serve the response then."""
    key = client.http.headers["authorization"].split()[1]
    with openai.OpenAI(base_url=f"{str(client.http.base_url).rstrip('/')}/v1", api_key=key, max_retries=0) as talk:
        if stored:
            first = talk.responses.create(
                model=MODEL, instructions=RULES, input=PLACES, store=True, max_output_tokens=8
            )
            compacted = talk.responses.compact(model=MODEL, previous_response_id=first.id, extra_body=SHORT)
        else:
            compacted = talk.responses.compact(model=MODEL, instructions=RULES, input=PLACES, extra_body=SHORT)
        before = responded(talk, compacted)
        for part in ("engine", "sidecar"):
            stack.kill(part)
        stack.mend()
        after = responded(talk, compacted)

    for response, sources in ((before, {"device", "host", "disk"}), (after, {"disk"})):
        context = response.usage.model_extra["context"]
        assert context["source"] in sources, context
        assert context["computed_tokens"] < 64, context
        assert context["cached_tokens"] > 0.9 * response.usage.input_tokens
    assert before.output_text == after.output_text
