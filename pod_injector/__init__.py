"""A mutating webhook that adds kv-sidecar, turn process and connector to vLLM pods that ask for it by label.

Content: the decision on an AdmissionReview, its JSONPatch, the HTTPS server, and the files that run when vLLM starts.
Not here: the additions themselves, and any call to the Kubernetes API.
"""
