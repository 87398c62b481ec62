"""A mutating webhook that adds the kv-sidecar and the plugin to vLLM pods that ask for it by label.

Content: the decision on an AdmissionReview, its JSONPatch, the HTTPS server, and the files that run when vLLM starts.
Not here: the sidecar and the plugin themselves, and any call to the Kubernetes API.
"""
