"""Files of the directory that injected vLLM containers have first on PYTHONPATH."""
