"""Who has which context, where its KV is, until when, and whose turn it is.

Read `manager.py` first, then `store.py` for the Redis keys. Other packages enter only by `client.py`. What does not
belong here: KV bytes (kv_sidecar), routing (gateway), anything about prompts beyond storing their segments.
"""
