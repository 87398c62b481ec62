"""The Envoy front: this process answers Envoy's external processor."""
