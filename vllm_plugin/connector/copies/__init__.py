"""Pages copied out of an engine's tensors and into them, on a CPU or a GPU. Asks no sidecar and knows no request.

Read `pages.py` first; `layout.py` knows the tensors that vLLM registers.
"""
