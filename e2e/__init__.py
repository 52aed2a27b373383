"""The local cluster, the traffic driver and the tests that run on a cluster."""
