"""What stands beside us, as its documentation starts it: LMCache, and vLLM's own tiering. For bench_beside.py."""
