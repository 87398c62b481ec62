{{/*
Pieces of NetworkPolicies. Lists are of YAML items; what takes a component gets dict "root" $ "component" "gateway".
*/}}

{{/* A policy up to its rules: name, labels, whose it is. Egress is denied too unless "ingressOnly" is true. */}}
{{- define "context-cache.network.head" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "context-cache.fullname" .root }}-{{ .component }}
  labels:
    {{- include "context-cache.labels" . | nindent 4 }}
  {{- include "context-cache.annotations" (dict "root" .root) | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "context-cache.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end }}

{{/* Pods of a component, as a peer. */}}
{{- define "context-cache.network.pods" -}}
- podSelector:
    matchLabels:
      {{- include "context-cache.selectorLabels" . | nindent 6 }}
{{- end }}

{{/* Every vLLM pod of the release, the chart's own and injected ones, as a peer. Takes the root. */}}
{{- define "context-cache.network.engines" -}}
- podSelector:
    matchLabels:
      context-cache.io/engines: {{ include "context-cache.fullname" . | quote }}
{{- end }}

{{/* Peers out of the values, or any pod of the cluster. */}}
{{- define "context-cache.network.peersOrCluster" -}}
{{- . | default (list (dict "namespaceSelector" (dict))) | toYaml }}
{{- end }}

{{/* Who may stand where our Envoy would: it, or the pods of somebody else's. Takes the root. */}}
{{- define "context-cache.network.proxies" -}}
{{- if eq .Values.envoy.mode "proxy" }}
{{- include "context-cache.network.pods" (dict "root" . "component" "envoy") }}
{{- else if ne .Values.envoy.mode "none" }}
{{- include "context-cache.network.peersOrCluster" .Values.networkPolicy.proxies }}
{{- end }}
{{- end }}

{{/*
The rule of the front, by port: dict "root" $ "port" 8080. No `from` is anybody, also from outside the cluster. The test
pod is named beside clients, who may be few.
*/}}
{{- define "context-cache.network.clients" -}}
- ports:
    - port: {{ .port }}
  {{- with .root.Values.networkPolicy.clients }}
  from:
    {{- toYaml . | nindent 4 }}
    {{- if $.root.Values.tests.enabled }}
    {{- include "context-cache.network.pods" (dict "root" $.root "component" "test") | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end }}

{{/* Rule for those who scrape: dict "root" $ "port" 9090. */}}
{{- define "context-cache.network.metrics" -}}
- ports:
    - port: {{ .port }}
  from:
    {{- include "context-cache.network.peersOrCluster" .root.Values.networkPolicy.monitoring | nindent 4 }}
{{- end }}

{{/* Rule to DNS. Takes the root. */}}
{{- define "context-cache.network.dns" -}}
- ports:
    {{- range .Values.networkPolicy.dns.ports }}
    - port: {{ . }}
      protocol: UDP
    - port: {{ . }}
      protocol: TCP
    {{- end }}
  {{- with .Values.networkPolicy.dns.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Rule to the collector of traces, or nothing. Takes the root. */}}
{{- define "context-cache.network.traces" -}}
{{- with .Values.tracing.endpoint }}
{{- $url := urlParse . }}
- ports:
    - port: {{ regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) | int }}
  {{- with $.Values.networkPolicy.traceCollectors }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/*
Rule to the shared store, or nothing: a mounted directory is the node's to reach. Its port is that of an endpoint whose
variable has a value, else 443. Takes the root.
*/}}
{{- define "context-cache.network.store" -}}
{{- $policy := .Values.networkPolicy.store }}
{{- if regexMatch "^(s3|gs|az)://" (get (.Values.sidecar.settings | default dict) "storeUrl" | default "") }}
{{- $ports := $policy.ports }}
{{- range .Values.sidecar.extraEnv }}
{{- if and (not $ports) .value (regexMatch "^(AWS|AZURE|GOOGLE)_[A-Z_]*(ENDPOINT|BASE_URL)" .name) }}
{{- $url := urlParse .value }}
{{- $ports = list (regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "80" "443" (eq $url.scheme "http")) | int) }}
{{- end }}
{{- end }}
- ports:
    {{- range $ports | default (list 443) }}
    - port: {{ . }}
    {{- end }}
  {{- with $policy.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Rule to the Kubernetes API. Its addresses are no pods', so they are networks or any. Takes the root. */}}
{{- define "context-cache.network.apiServer" -}}
- ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - port: {{ . }}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer.cidrs }}
  to:
    {{- range . }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  {{- end }}
{{- end }}

{{/* Rule to the context managers. Takes the root. */}}
{{- define "context-cache.network.manager" -}}
- ports:
    - port: 50051
  to:
    {{- include "context-cache.network.pods" (dict "root" . "component" "context-manager") | nindent 4 }}
{{- end }}

{{/*
Ports of the store, a JSON list: those in redis.url unless redis.egress.port says another. Sentinels only say where the
store is, so its own port is open beside theirs. Takes the root.
*/}}
{{- define "context-cache.network.redisPorts" -}}
{{- $url := .Values.redis.url }}
{{- $sentinels := contains "+sentinel://" $url }}
{{- $named := list }}
{{- range regexReplaceAll "^[a-z+]+://([^/?]*).*$" $url "${1}" | splitList "," }}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" .) | default (ternary "26379" "6379" $sentinels) }}
{{- $named = append $named ($port | int) }}
{{- end }}
{{- $own := .Values.redis.egress.port | int }}
{{- if $sentinels }}
{{- append $named ($own | default 6379) | uniq | toJson }}
{{- else }}
{{- ternary (list $own) $named (gt $own 0) | toJson }}
{{- end }}
{{- end }}

{{/* Rules out of the values: dict "rules" .Values.networkPolicy.extraEgress "component" "contextManager". */}}
{{- define "context-cache.network.extra" -}}
{{- with get (.rules | default dict) .component }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/*
Rule for vLLM's port. Its metrics are there too, so who scrapes could also ask the model: only those who are named. Turn
processes of other pods continue an answer here whose own engine is gone. Somebody else's proxy uses the turn port alone.
*/}}
{{- define "context-cache.network.vllm" -}}
- ports:
    - port: {{ .Values.discovery.port }}
  from:
    {{- include "context-cache.network.pods" (dict "root" . "component" "gateway") | nindent 4 }}
    {{- if eq .Values.envoy.mode "proxy" }}
    {{- include "context-cache.network.proxies" . | nindent 4 }}
    {{- end }}
    {{- include "context-cache.network.engines" . | nindent 4 }}
    {{- with .Values.networkPolicy.monitoring }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Rule for the port of the turn process, whose metrics are there too. */}}
{{- define "context-cache.network.turn" -}}
- ports:
    - port: {{ .Values.discovery.turnPort }}
  from:
    {{- include "context-cache.network.pods" (dict "root" . "component" "gateway") | nindent 4 }}
    {{- include "context-cache.network.proxies" . | nindent 4 }}
    {{- with .Values.networkPolicy.monitoring }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Rules for the sidecar's ports: gateways ask and delete, other sidecars fetch KV. Events have prompts: named peers only. */}}
{{- define "context-cache.network.sidecar" -}}
- ports:
    - port: {{ .Values.discovery.sidecarPort }}
  from:
    {{- include "context-cache.network.pods" (dict "root" . "component" "gateway") | nindent 4 }}
    {{- if .Values.sidecar.peers }}
    {{- include "context-cache.network.engines" . | nindent 4 }}
    {{- end }}
{{ include "context-cache.network.metrics" (dict "root" . "port" 9091) }}
{{- $events := include "context-cache.sidecar.eventPorts" . | fromJsonArray }}
{{- if and $events .Values.networkPolicy.eventSubscribers }}
- ports:
    {{- range $events }}
    - port: {{ . }}
    {{- end }}
  from:
    {{- toYaml .Values.networkPolicy.eventSubscribers | nindent 4 }}
{{- end }}
{{- end }}

{{/*
Injected pods are somebody else's: opting in must not cut what they did before. A policy closes all ports of the pods it
selects, so this one opens all again but those that came with us: the sidecar's, which hold KV of every tenant, and
the turn process's. vLLM's port stays as open as it was, unless injectedPods.restrictHttp says that everybody has moved to the front; what reaches it
directly gets no context, as only signed requests do. Policies add up: where the owner's own ones are to decide, which
would not have opened all that, this one has to open nothing (injectedPods.ownPolicies). What these pods call is not restricted: no Egress here.
*/}}
{{- define "context-cache.network.injected" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "context-cache.fullname" . }}-injected
  labels:
    {{- include "context-cache.labels" (dict "root" .) | nindent 4 }}
  {{- include "context-cache.annotations" (dict "root" .) | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      context-cache.io/engines: {{ include "context-cache.fullname" . | quote }}
      {{- /* Only pods that asked for injection carry it, the chart's own do not. */}}
      context-cache.io/inject: "true"
  policyTypes: [Ingress]
  ingress:
    {{- include "context-cache.network.sidecar" . | nindent 4 }}
    {{- include "context-cache.network.turn" . | nindent 4 }}
    {{- if or .Values.networkPolicy.injectedPods.restrictHttp .Values.networkPolicy.injectedPods.ownPolicies }}
    {{- include "context-cache.network.vllm" . | nindent 4 }}
    {{- end }}
    {{- if not .Values.networkPolicy.injectedPods.ownPolicies }}
    {{- include "context-cache.network.otherPorts" . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* A rule for every port but those of sidecar and turn process (and vLLM's): ranges between them, for each protocol. */}}
{{- define "context-cache.network.otherPorts" -}}
{{- $closed := list (int .Values.discovery.sidecarPort) (int .Values.discovery.turnPort) 9091 }}
{{- if .Values.networkPolicy.injectedPods.restrictHttp }}
{{- $closed = append $closed (int .Values.discovery.port) }}
{{- end }}
{{- range include "context-cache.sidecar.eventPorts" . | fromJsonArray }}{{ $closed = append $closed (int .) }}{{ end }}
{{- $sorted := list }}
{{- range $closed }}{{ $sorted = append $sorted (printf "%05d" .) }}{{ end }}
{{- $first := 1 }}
- ports:
    - port: 1
      endPort: 65535
      protocol: UDP
    - port: 1
      endPort: 65535
      protocol: SCTP
    {{- range append ($sorted | sortAlpha | uniq) "65536" }}
    {{- $port := atoi (regexReplaceAll "^0+" . "") }}
    {{- if lt $first $port }}
    - port: {{ $first }}
      endPort: {{ sub $port 1 }}
    {{- end }}
    {{- $first = add $port 1 | int }}
    {{- end }}
{{- end }}
