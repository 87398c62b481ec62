"""The images: two Dockerfiles, and what the plugin brings along into vLLM's container."""
