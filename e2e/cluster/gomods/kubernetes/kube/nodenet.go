package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// nodenet is the pod network of a cluster whose nodes share one bridge: it writes this node's CNI
// configuration, keeps a route to every other node's pods, and refuses what would leave the cluster.

const cniFile = "/etc/cni/net.d/10-nodenet.conflist"

const cniConfig = `{"cniVersion": "1.0.0", "name": "nodenet", "plugins": [
  {"type": "ptp", "ipMasq": false, "mtu": 1500, "ipam": {
    "type": "host-local", "dataDir": "/run/cni-ipam", "ranges": [[{"subnet": "%s"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
`

// firewall hides pods behind their node towards the bridge, and resets what goes to neither pod nor node.
// Without the reset a client that is quicker than kube-proxy sends its first SYN into the void and waits
// 30 s before it tries again (CoreDNS does).
const firewall = `*nat
:NODENET - [0:0]
-A NODENET ! -s %[1]s -j RETURN
-A NODENET -d %[1]s -j RETURN
-A NODENET -j MASQUERADE
COMMIT
*filter
:NODENET - [0:0]
-A NODENET ! -s %[1]s -j RETURN
-A NODENET -d %[1]s -j RETURN
-A NODENET -d %[2]s -j RETURN
-A NODENET -p tcp -j REJECT --reject-with tcp-reset
-A NODENET -j REJECT
COMMIT
`

type nodenet struct {
	node, podSubnet string
	uplink          netlink.Link
}

func runNodenet() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	net := &nodenet{node: os.Getenv("NODE_NAME"), podSubnet: os.Getenv("POD_SUBNET")}
	if err := net.run(ctx, os.Getenv("CONTROL_PLANE_ENDPOINT")); err != nil {
		klog.ErrorS(err, "nodenet stopped")
		return 1
	}
	return 0
}

func (n *nodenet) run(ctx context.Context, endpoint string) error {
	var err error
	if n.uplink, err = netlink.LinkByName("eth0"); err != nil {
		return err
	}
	if err := n.protect(); err != nil {
		return err
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	if endpoint != "" {
		config.Host = "https://" + endpoint // the service address works only once kube-proxy does
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, time.Minute)
	_, err = factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { n.learn(obj.(*corev1.Node)) },
		UpdateFunc: func(_, obj any) { n.learn(obj.(*corev1.Node)) },
		DeleteFunc: func(obj any) {
			if node, ok := obj.(*corev1.Node); ok {
				n.forget(node)
			}
		},
	})
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	// kubelet or a person may flush the tables: put the rules back.
	wait.UntilWithContext(ctx, func(context.Context) {
		if err := n.protect(); err != nil {
			klog.ErrorS(err, "firewall not set")
		}
	}, time.Minute)
	factory.Shutdown()
	return nil
}

func (n *nodenet) learn(node *corev1.Node) {
	if node.Spec.PodCIDR == "" {
		return
	}
	var err error
	if node.Name == n.node {
		err = writeCNI(node.Spec.PodCIDR)
	} else {
		err = n.route(node, netlink.RouteReplace)
	}
	if err != nil {
		klog.ErrorS(err, "node not joined", "node", node.Name)
	}
}

func (n *nodenet) forget(node *corev1.Node) {
	if err := n.route(node, netlink.RouteDel); err != nil {
		klog.ErrorS(err, "route not removed", "node", node.Name)
	}
}

func (n *nodenet) route(node *corev1.Node, change func(*netlink.Route) error) error {
	_, pods, err := net.ParseCIDR(node.Spec.PodCIDR)
	if err != nil {
		return err
	}
	for _, address := range node.Status.Addresses {
		if address.Type == corev1.NodeInternalIP {
			gateway := net.ParseIP(address.Address)
			return change(&netlink.Route{Dst: pods, Gw: gateway, LinkIndex: n.uplink.Attrs().Index})
		}
	}
	return nil
}

func (n *nodenet) protect() error {
	addresses, err := netlink.AddrList(n.uplink, netlink.FAMILY_V4)
	if err != nil || len(addresses) == 0 {
		return fmt.Errorf("eth0 has no IPv4 address: %w", err)
	}
	_, nodes, err := net.ParseCIDR(addresses[0].IPNet.String())
	if err != nil {
		return err
	}
	rules := fmt.Sprintf(firewall, n.podSubnet, nodes)
	if err := command(rules, "iptables-restore", "--wait", "--noflush"); err != nil {
		return err
	}
	for _, at := range []string{"nat POSTROUTING", "filter FORWARD"} {
		table, chain, _ := strings.Cut(at, " ")
		rule := []string{chain, "-o", "eth0", "-j", "NODENET"}
		if command("", "iptables", append([]string{"--wait", "-t", table, "-C"}, rule...)...) == nil {
			continue
		}
		if err := command("", "iptables", append([]string{"--wait", "-t", table, "-A"}, rule...)...); err != nil {
			return err
		}
	}
	return nil
}

// writeCNI renames a whole file into place: containerd watches the folder and would read half of one.
func writeCNI(podCIDR string) error {
	want := fmt.Sprintf(cniConfig, podCIDR)
	if have, err := os.ReadFile(cniFile); err == nil && string(have) == want {
		return nil
	}
	part := filepath.Join(filepath.Dir(cniFile), ".nodenet.part")
	if err := os.WriteFile(part, []byte(want), 0o644); err != nil {
		return err
	}
	klog.InfoS("pod network ready", "pods", podCIDR)
	return os.Rename(part, cniFile)
}

func command(stdin, name string, args ...string) error {
	run := exec.Command(name, args...)
	run.Stdin = strings.NewReader(stdin)
	if out, err := run.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
