"""The KV connector, in vLLM's engine and worker processes: saves and loads the KV of contexts.

No step waits for it that has something to compute.

Read connector.py (what vLLM calls), then scheduler_side.py and worker_side.py. The only importer of torch and vllm.
What belongs elsewhere: turns and transcripts (`vllm_plugin.turn`), storing KV (`kv_sidecar`).
"""

from vllm_plugin.connector.connector import ContextCacheConnector

__all__ = ["ContextCacheConnector"]
