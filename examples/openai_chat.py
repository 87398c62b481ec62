"""A conversation with the openai client: create a context once, then send only the new message. `make up` first."""

import os

from openai import OpenAI

MODEL = "smollm2-135m-instruct"

api = OpenAI(
    base_url=os.environ.get("CONTEXT_CACHE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("CONTEXT_CACHE_API_KEY", "test-key-1234567890"),
)

first = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "ttl": 3600,
    "max_tokens": 32,
    "temperature": 0,
}
created = api.post("/context", body=first, cast_to=object)
session_id = created["session_id"]
print(created["choices"][0]["message"]["content"])

for question in ("And of Spain?", "And of Italy?"):
    stream = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        stream=True,
        temperature=0,
        max_tokens=32,
        extra_body={"session_id": session_id},
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="")
        if chunk.usage:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            computed = chunk.usage.prompt_tokens - cached
            print(f"\n  computed {computed}, cached {cached} from {chunk.usage.context['source']}")

api.delete(f"/context/{session_id}", cast_to=object)
