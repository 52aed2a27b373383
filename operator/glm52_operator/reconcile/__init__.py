"""The only part that talks to the cluster: watch, queue, apply, report."""
