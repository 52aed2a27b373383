// Command helm is the plain Helm client; here because it shares most of its packages with kubectl.
package main

import (
	"log/slog"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
)

func main() {
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		slog.Warn("command failed", slog.Any("error", err))
		os.Exit(1)
	}
	if err := command.Execute(); err != nil {
		os.Exit(1)
	}
}
