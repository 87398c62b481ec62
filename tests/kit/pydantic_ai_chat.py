"""A chat over pydantic-ai: reads one JSON string a line, prints one answer a line (see tests/kit/clients.py).

Runs in an environment of its own: pydantic-ai wants other releases of what we test with.
"""

import asyncio
import json
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
agent = Agent(
    OpenAIChatModel(os.environ["MODEL"], provider=provider),
    instructions=os.environ["SYSTEM"],
    model_settings={"temperature": 0, "max_tokens": 12, "extra_body": json.loads(os.environ["CONTEXT"])},
)


async def chat() -> None:
    messages = []
    for number, line in enumerate(sys.stdin):
        text = json.loads(line)
        if number % 2:  # every other turn whole, the others streamed
            result = await agent.run(text, message_history=messages)
            said = result.output
        else:
            async with agent.run_stream(text, message_history=messages) as result:
                said = await result.get_output()
        usage, messages = result.usage, result.all_messages()
        told = {
            "text": said,
            "prompt_tokens": usage.input_tokens,
            "cached_tokens": usage.cache_read_tokens,
            "answer_tokens": usage.output_tokens,
        }
        print(json.dumps(told), flush=True)


asyncio.run(chat())
