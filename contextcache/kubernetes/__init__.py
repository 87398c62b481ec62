"""The Kubernetes API: one client, and its answers read."""
