"""The pods: discovery, readiness, load, KV at their sidecars, and the choice of a pod for a request."""
