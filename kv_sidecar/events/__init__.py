"""Events of stored blocks for routers of other projects, in vLLM's format. Knows no tier and moves no KV (ADR 0139)."""
