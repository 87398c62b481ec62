"""A mutating webhook that adds the kv-sidecar and the plugin to vLLM pods that ask for it by label.

What belongs here: reading an AdmissionReview, the JSONPatch, the HTTPS server. What does not: the sidecar and the
plugin themselves, and any call to the Kubernetes API: the webhook needs no rights.
"""
