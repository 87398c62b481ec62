"""The words all processes share: model, errors, conversion, clock, identity, rpc, settings, logs, metrics.

What belongs here: names and shapes that at least two of the five packages need. What does not: anything that
knows Redis, KV bytes, HTTP routes or vLLM. It imports none of the other packages.
"""
