{{/*
Envoy in its four modes.
*/}}

{{/*
Env items of both containers of ours beside Envoy: what its bootstrap is written from, and what it is drained by. Names
end in a dot: they are complete, and Envoy looks them up once a second without trying search domains. Takes the root.
*/}}
{{- define "context-cache.envoy.env" -}}
{{- $gateways := printf "%s." (include "context-cache.serviceHost" (dict "root" . "service" "gateway-headless")) }}
{{- $pods := printf "%s." (include "context-cache.serviceHost" (dict "root" . "service" "engines")) }}
- name: ENVOY_CONFIG_DIR
  value: /etc/context-cache/envoy
- name: ENVOY_GATEWAYS
  value: {{ list (printf "%s:8000,%s:9002" $gateways $gateways) | toJson | quote }}
- name: ENVOY_PODS
  value: {{ list (printf "%s:%d" $pods (int .Values.discovery.turnPort)) | toJson | quote }}
- name: ENVOY_ENGINES
  value: {{ list (printf "%s:%d" $pods (int .Values.discovery.port)) | toJson | quote }}
- name: ENVOY_LISTEN_HOST
  value: 0.0.0.0
- name: ENVOY_LISTEN_PORT
  value: {{ include "context-cache.envoy.port" . | quote }}
- name: ENVOY_ADMIN_HOST
  value: 127.0.0.1
- name: ENVOY_METRICS_LISTEN
  value: 0.0.0.0:9090
- name: ENVOY_API_KEYS_FILE
  value: /etc/context-cache/keys/api-keys.json
- name: ENVOY_DRAIN_DELAY_S
  value: {{ .Values.envoy.drainDelayS | quote }}
- name: ENVOY_DRAIN_TIMEOUT_S
  value: {{ .Values.envoy.drainTimeoutS | quote }}
- name: ENVOY_LOG_LEVEL
  value: {{ .Values.logLevel }}
{{- if .Values.envoy.tls.existingSecret }}
- name: ENVOY_LISTEN_CERT_FILE
  value: /etc/context-cache/listen-tls/tls.crt
- name: ENVOY_LISTEN_KEY_FILE
  value: /etc/context-cache/listen-tls/tls.key
{{- end }}
{{- include "context-cache.tls.env" (dict "root" . "prefix" "ENVOY_") | nindent 0 }}
{{- include "context-cache.traces.env" (dict "root" . "prefix" "ENVOY_") | nindent 0 }}
{{- $both := pick .Values.gateway.settings "maxBodyBytes" "enginePaths" "corsOrigins" }}
{{- include "context-cache.settingsEnv" (dict "prefix" "ENVOY_" "settings" (merge $both .Values.envoy.settings)) | nindent 0 }}
{{- end }}

{{/* Port that Envoy takes clients' requests on. */}}
{{- define "context-cache.envoy.port" -}}
{{- ternary 8080 8443 (eq .Values.envoy.tls.existingSecret "") }}
{{- end }}

{{/* Env items of a gateway that depend on who stands in front of it. Takes the root. */}}
{{- define "context-cache.envoy.gatewayEnv" -}}
{{- if ne .Values.envoy.mode "none" }}
- name: GATEWAY_EXT_PROC_LISTEN
  value: 0.0.0.0:9002
{{- end }}
{{- if .Values.tls.enabled }}
{{- /* Clients themselves have no certificate of the release's; a proxy in front has one. */}}
- name: GATEWAY_TLS_CLIENTS
  value: {{ ternary "none" "required" (eq .Values.envoy.mode "none") }}
{{- end }}
{{- end }}

{{/* The parentRefs and hostnames of a route. Takes the root. */}}
{{- define "context-cache.envoy.parents" -}}
parentRefs:
  {{- range .Values.envoy.parentRefs }}
  - name: {{ .name }}
    {{- with .namespace }}
    namespace: {{ . }}
    {{- end }}
    {{- with .sectionName }}
    sectionName: {{ . }}
    {{- end }}
  {{- end }}
{{- with .Values.envoy.hostnames }}
hostnames:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The two routes of modes envoyGateway and inferencePool: calls on contexts go to the gateways, what pods answer to the
backend of pods. Which way a request takes is said by its method and path as gateway/envoy/envoy.yaml.j2 says it, as far as
prefixes can: what else begins so is refused by the gateway, whose plugin sees every request on the way to a pod.

No filter of these routes may touch x-context-identity or x-gateway-destination-endpoint: routes change headers after the
plugin has set them.

dict "root" $ "backend" (a backendRef)
*/}}
{{- define "context-cache.envoy.routes" -}}
{{- $fullname := include "context-cache.fullname" .root }}
{{- $labels := include "context-cache.labels" (dict "root" .root "component" "envoy") }}
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {{ $fullname }}-control
  labels:
    {{- $labels | nindent 4 }}
  {{- include "context-cache.annotations" (dict "root" .root) | nindent 2 }}
spec:
  {{- include "context-cache.envoy.parents" .root | nindent 2 }}
  rules:
    - matches:
        - path: {type: PathPrefix, value: /v1/context}
        - path: {type: PathPrefix, value: /console}
        {{- range $path := list "/v1/usage" "/v1/deployment" "/healthz" "/readyz" "/openapi.json" }}
        - path: {type: Exact, value: {{ $path }}}
        {{- end }}
      timeouts:
        request: 30s
      backendRefs:
        - name: {{ $fullname }}-gateway
          port: {{ include "context-cache.gateway.port" .root }}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {{ $fullname }}-engines
  labels:
    {{- $labels | nindent 4 }}
  {{- include "context-cache.annotations" (dict "root" .root) | nindent 2 }}
spec:
  {{- include "context-cache.envoy.parents" .root | nindent 2 }}
  rules:
    - matches:
        - path: {type: Exact, value: /v1/context}
          method: POST
        - path: {type: PathPrefix, value: /v1}
        {{- range $path := list "/classify" "/detokenize" "/generative_scoring" "/pooling" "/rerank" "/score" "/tokenize" "/v2/embed" "/v2/rerank" }}
        - path: {type: Exact, value: {{ $path }}}
          method: POST
        {{- end }}
        {{- range $call := .root.Values.gateway.settings.enginePaths }}
        - path: {type: Exact, value: {{ index (splitList " " $call) 1 | quote }}}
          method: {{ index (splitList " " $call) 0 }}
        {{- end }}
      timeouts:
        request: {{ printf "%.0fs" (minf 99999 (dig "totalTimeoutS" 3600 .root.Values.envoy.settings)) }}
      backendRefs:
        - {{- toYaml .backend | nindent 10 }}
{{- end }}
