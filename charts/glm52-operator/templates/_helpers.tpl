{{- define "glm52-operator.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "glm52-operator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "glm52-operator.labels" -}}
{{ include "glm52-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: glm52
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The namespaces that the operator is told to serve, as a JSON list; empty: all. */}}
{{- define "glm52-operator.namespaces" -}}
{{- if or .Values.watchNamespaces .Values.rbac.clusterWide -}}
{{- .Values.watchNamespaces | toJson -}}
{{- else -}}
{{- list .Release.Namespace | toJson -}}
{{- end -}}
{{- end -}}

{{/* Everything that the operator does in a namespace it serves. */}}
{{- define "glm52-operator.rules" -}}
- apiGroups: [glm52.dev]
  resources: [glm52deployments]
  verbs: [list, watch]
- apiGroups: [glm52.dev]
  resources: [glm52deployments/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion, where the API server enforces who may set them.
- apiGroups: [glm52.dev]
  resources: [glm52deployments/finalizers]
  verbs: [update]
# Children: a server-side apply needs create and patch.
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# The internal token of a deployment is made once and looked up by name: Secrets are neither listed nor changed.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
# Why pods do not start, how they end, and the rollout: pods that serve are evicted, so that disruption budgets have a
# say. A patch tells a pod that crashes to wait before it starts again.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
# What kubectl describe shows of a deployment.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
# Handed on to the routers: nobody can grant what they do not have.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- end -}}
