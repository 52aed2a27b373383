// Command etcd is the plain etcd server, at the version that this Kubernetes itself is tested with.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
