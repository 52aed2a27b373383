"""A real Kubernetes cluster on this machine: `python -m e2e.cluster up`."""

from e2e.cluster.errors import Failed, Refused
from e2e.cluster.lifecycle import Cluster, attach, down, ensure

__all__ = ["Cluster", "Failed", "Refused", "attach", "down", "ensure"]
