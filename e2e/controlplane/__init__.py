"""A control plane without nodes: etcd, kube-apiserver and kube-controller-manager as plain processes on loopback.

The API server, its admission, its watches and the controllers are the real ones. Only kubelets are missing;
`standin.Kubelets` plays them, so that a test says when a pod runs, is ready, crashes or hangs.
"""
