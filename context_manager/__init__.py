"""Sessions: their tenants, transcripts, holders of KV, lives and leases.

Read `manager.py` first, then `layout.py` for the Redis keys. Other packages import only `client.py`. Not here: KV bytes
(kv_sidecar), routing (gateway), and the meaning of prompts.
"""
