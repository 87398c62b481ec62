"""Other projects' software in the place of parts of ours. `vllm_plugin/turn/app.py` alone imports it."""
