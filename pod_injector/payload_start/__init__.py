"""The directory that injected vLLM containers have on PYTHONPATH; it holds `sitecustomize` and nothing else."""
