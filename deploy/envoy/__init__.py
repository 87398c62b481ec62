"""Envoy in front of the pods: its bootstrap, generated from one place for the local stack and for clusters."""
