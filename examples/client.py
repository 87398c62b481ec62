"""A conversation with the Python client: create a context, go on in it, stream, branch off. `make up` first."""

import os

from contextcache.client import ContextCache, TextDelta

MODEL = "smollm2-135m-instruct"

client = ContextCache(
    os.environ.get("CONTEXT_CACHE_URL", "http://127.0.0.1:8000"),
    os.environ.get("CONTEXT_CACHE_API_KEY", "test-key-1234567890"),
)
question = [{"role": "user", "content": "What is the capital of France?"}]

with (
    client,
    client.contexts.create(
        MODEL, messages=question, ttl=3600, max_tokens=32, temperature=0, delete_at_end=True
    ) as context,
):
    print(context.reply.text)

    reply = context.chat("And of Spain?", max_tokens=32, temperature=0)
    print(reply.text)
    print(f"  computed {reply.usage.context.computed_tokens}, cached {reply.usage.context.cached_tokens}")

    with context.chat_stream("And of Italy?", max_tokens=32, temperature=0) as stream:
        for event in stream:
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)
        took = stream.reply().usage.context
    print(f"\n  computed {took.computed_tokens}, cached {took.cached_tokens} from {took.source}")

    branch = context.fork(generation=2)
    print(branch.chat("And of Portugal?", max_tokens=32, temperature=0).text)
    branch.delete()
