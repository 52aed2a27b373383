"""Kubernetes operator for GLM-5.2 with prefill/decode disaggregation."""
