"""A chat over LlamaIndex: reads one JSON string a line, prints one answer a line (see tests/kit/clients.py).

Runs in an environment of its own: LlamaIndex wants an older `openai` than the rest of us.
"""

import json
import os
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

chat = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    is_chat_model=True,
    temperature=0,
    max_tokens=12,
    max_retries=0,
)
messages = [ChatMessage(role="system", content=os.environ["SYSTEM"])]
for number, line in enumerate(sys.stdin):
    messages.append(ChatMessage(role="user", content=json.loads(line)))
    if number % 2:  # every other turn whole, the others streamed
        answer = chat.chat(messages)
    else:
        *_, answer = chat.stream_chat(messages, stream_options={"include_usage": True})
    usage, details = answer.raw.usage, answer.raw.usage.prompt_tokens_details
    messages.append(ChatMessage(role="assistant", content=answer.message.content))
    told = {
        "text": answer.message.content,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": (details and details.cached_tokens) or 0,
        "answer_tokens": usage.completion_tokens,
    }
    print(json.dumps(told), flush=True)
