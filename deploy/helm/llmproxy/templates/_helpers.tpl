{{- define "llmproxy.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "llmproxy.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "llmproxy.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "llmproxy.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "llmproxy.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "llmproxy.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: name the account, or let the chart create one" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "llmproxy.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- /* What the pods need from `config`, with llmproxy's own defaults. */ -}}
{{- define "llmproxy.port" -}}
{{ dig "port" 8080 .Values.config | int }}
{{- end -}}

{{- define "llmproxy.adminPort" -}}
{{ dig "admin" "port" nil .Values.config | default (include "llmproxy.port" .) | int }}
{{- end -}}

{{- define "llmproxy.adminPortName" -}}
{{ ternary "http" "admin" (eq (include "llmproxy.port" .) (include "llmproxy.adminPort" .)) }}
{{- end -}}

{{- /* The admin port serves when `clients.connections_max` is reached. The kubelet cannot reach one on loopback. */ -}}
{{- define "llmproxy.livenessPortName" -}}
{{ has (dig "admin" "host" "127.0.0.1" .Values.config) (list "127.0.0.1" "::1" "localhost") | ternary "http" (include "llmproxy.adminPortName" .) }}
{{- end -}}

{{- define "llmproxy.scheme" -}}
{{- if dig "tls" "client_ca" "" .Values.config -}}
{{- fail "config.tls.client_ca: probes of Kubernetes have no certificate; let what stands in front ask for those of clients" -}}
{{- end -}}
{{ dig "tls" "cert" "" .Values.config | empty | ternary "http" "https" }}
{{- end -}}

{{- /* The drain, and what ending takes beyond it. */ -}}
{{- define "llmproxy.graceSeconds" -}}
{{ addf (dig "drain_delay_s" 0 .Values.config) (dig "drain_timeout_s" 30 .Values.config) 15 | ceil | int }}
{{- end -}}

{{- define "llmproxy.stateFolder" -}}
{{- $file := dig "state_file" "none" .Values.config -}}
{{- if not (has $file (list "auto" "none")) -}}
{{- if not (regexMatch "^/.+/[^/]+$" $file) -}}
{{- fail (printf "config.state_file: %q should be an absolute path in a folder of its own, such as /var/lib/llmproxy/state.json" $file) -}}
{{- end -}}
{{ dir $file }}
{{- end -}}
{{- end -}}

{{- /* What a running proxy does not read again: a change of it replaces the pods. */ -}}
{{- define "llmproxy.restartKeys" -}}
admin cluster decision_log decision_log_sample host log_format plugins port reload state_file tls tracing usage workers
{{- end -}}

{{- define "llmproxy.restartSchedulingKeys" -}}
fairness fairness_cost input_weight ordering output_weight placement seed slo_window_s
{{- end -}}

{{- define "llmproxy.restartChecksum" -}}
{{- $read := dict "clients" (omit (dig "clients" dict .Values.config | default dict) "allowed_origins") -}}
{{- $scheduling := dig "scheduling" dict .Values.config | default dict -}}
{{- range splitList " " (include "llmproxy.restartKeys" .) -}}{{- $_ := set $read . (get $.Values.config .) -}}{{- end -}}
{{- range splitList " " (include "llmproxy.restartSchedulingKeys" .) -}}{{- $_ := set $read . (get $scheduling .) -}}{{- end -}}
{{- $read | toJson | sha256sum -}}
{{- end -}}

{{- /* JSON, namespace -> resource -> true: what the URLs of `config.backends` make the proxy list and watch, and
     the Leases of a cluster. */ -}}
{{- define "llmproxy.rights" -}}
{{- $kinds := dict "service" "service" "services" "service" "svc" "service" "pods" "pods" "pod" "pods" "po" "pods" "inferencepool" "inferencepool" "inferencepools" "inferencepool" "infpool" "inferencepool" -}}
{{- $rights := dict -}}
{{- range .Values.config.backends -}}
  {{- $url := . -}}
  {{- if kindIs "map" . -}}{{- $url = .url -}}{{- end -}}
  {{- /* The role that may stand before a URL. */ -}}
  {{- $url = regexReplaceAll "^[^:=]*=\\s*" $url "" -}}
  {{- if hasPrefix "kubernetes+" (lower $url) -}}
    {{- $parts := splitList "/" (regexReplaceAll "^[^/]*//" $url "") -}}
    {{- $namespace := $.Release.Namespace -}}
    {{- $kind := get $kinds (lower (first $parts)) -}}
    {{- if not $kind -}}
      {{- $namespace = first $parts -}}
      {{- $kind = get $kinds (lower (index (append $parts "") 1)) -}}
    {{- end -}}
    {{- if not $kind -}}
      {{- fail (printf "config.backends: %q should be kubernetes+http://[NAMESPACE/]TYPE/NAME[:PORT], and TYPE service, pods or inferencepool" $url) -}}
    {{- end -}}
    {{- $found := get $rights $namespace | default dict -}}
    {{- $_ := set $rights $namespace $found -}}
    {{- if eq $kind "service" -}}{{- $_ := set $found "endpointslices" true -}}{{- end -}}
    {{- if ne $kind "service" -}}{{- $_ := set $found "pods" true -}}{{- end -}}
    {{- if eq $kind "inferencepool" -}}{{- $_ := set $found "inferencepools" true -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- if eq (include "llmproxy.locksByLease" .) "true" -}}
  {{- $found := get $rights .Release.Namespace | default dict -}}
  {{- $_ := set $found "leases" (list (dig "cluster" "name" "llmproxy" .Values.config)) -}}
  {{- $_ := set $rights .Release.Namespace $found -}}
{{- end -}}
{{- $rights | toJson -}}
{{- end -}}

{{- define "llmproxy.clusterPort" -}}
{{- with dig "cluster" "listen" "" .Values.config -}}{{- regexFind "[0-9]+$" . -}}{{- end -}}
{{- end -}}

{{- define "llmproxy.locksByLease" -}}
{{- and (include "llmproxy.clusterPort" . | empty | not) (eq (dig "cluster" "lock" "kubernetes" .Values.config) "kubernetes") -}}
{{- end -}}

{{- define "llmproxy.roleName" -}}
{{- $name := include "llmproxy.name" .root -}}
{{- eq .namespace .root.Release.Namespace | ternary $name (printf "%s.%s" $name .root.Release.Namespace) -}}
{{- end -}}

{{- /* As in kustomize/overlays/autoscale/keda.yaml. */ -}}
{{- define "llmproxy.scalingBehavior" -}}
scaleUp:
  # The number is already what is needed. Without this line an HPA ignores a need within a tenth of what there is, which
  # from ten replicas on is a whole replica. It needs Kubernetes 1.33 with the gate HPAConfigurableTolerance.
  {{- if semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version }}
  tolerance: "0"
  {{- end }}
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: 15}
    - {type: Pods, value: 4, periodSeconds: 15}
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
