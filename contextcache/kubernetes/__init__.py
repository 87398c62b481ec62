"""Kubernetes API: one client, and the objects of its answers."""
