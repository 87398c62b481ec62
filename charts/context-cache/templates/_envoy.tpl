{{/*
Envoy in its four modes. The bootstrap itself is files/envoy.yaml, made from deploy/envoy.
*/}}

{{/* A duration as Envoy reads it, to the millisecond, from a number of seconds. As deploy/envoy/settings.py duration. */}}
{{- define "context-cache.envoy.duration" -}}
{{- regexReplaceAll "\\.?0+$" (printf "%.3f" (float64 .)) "" }}s
{{- end }}

{{/*
Settings of the bootstrap as JSON: the defaults of deploy/envoy, then the values, then what the chart knows better. Names
end in a dot: they are complete, and Envoy looks them up once a second without trying search domains.
*/}}
{{- define "context-cache.envoy.settings" -}}
{{- $settings := .Files.Get "files/envoy-defaults.json" | fromJson }}
{{- range $key, $value := .Values.envoy.settings }}
{{- $_ := set $settings $key $value }}
{{- end }}
{{- range $key := list "maxBodyBytes" "enginePaths" "corsOrigins" }}
{{- if hasKey $.Values.gateway.settings $key }}
{{- $_ := set $settings $key (get $.Values.gateway.settings $key) }}
{{- end }}
{{- end }}
{{- $_ := set $settings "gatewayHost" (printf "%s." (include "context-cache.serviceHost" (dict "root" . "service" "gateway-headless"))) }}
{{- $_ := set $settings "podsHost" (printf "%s." (include "context-cache.serviceHost" (dict "root" . "service" "engines"))) }}
{{- $_ := set $settings "podsPort" .Values.discovery.port }}
{{- $_ := set $settings "listenPort" (include "context-cache.envoy.port" . | int) }}
{{- $_ := set $settings "drainDelayS" .Values.envoy.drainDelayS }}
{{- $_ := set $settings "tls" .Values.tls.enabled }}
{{- $_ := set $settings "tlsServerName" .Values.tls.serverName }}
{{- $_ := set $settings "listenTls" (ne .Values.envoy.tls.existingSecret "") }}
{{- $_ := set $settings "tracesSampleRatio" .Values.tracing.sampleRatio }}
{{- with .Values.tracing.endpoint }}
{{- $url := urlParse . }}
{{- $_ := set $settings "tracesHost" (trimAll "[]" $url.hostname) }}
{{- $_ := set $settings "tracesPort" (regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default "4317" | int) }}
{{- $_ := set $settings "tracesTls" (eq $url.scheme "https") }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{/* The data of Envoy's ConfigMap. Takes the root. */}}
{{- define "context-cache.envoy.files" -}}
{{- $settings := include "context-cache.envoy.settings" . | fromJson }}
{{- tpl (.Files.Get "files/envoy.yaml") (dict "Template" .Template "settings" $settings) }}
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
# Clients themselves have no certificate of the release's; a proxy in front has one.
- name: GATEWAY_TLS_CLIENTS
  value: {{ ternary "none" "required" (eq .Values.envoy.mode "none") }}
{{- end }}
{{- end }}

{{/* The parentRefs and hostnames of a route. Takes the root. */}}
{{- define "context-cache.envoy.parents" -}}
{{- if not .Values.envoy.parentRefs }}
{{- fail (printf "envoy.parentRefs: envoy.mode %s needs at least one Gateway for its routes" .Values.envoy.mode) }}
{{- end }}
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
backend of pods. Which way a request takes is said by its method and path as deploy/envoy/routes.py says it, as far as
prefixes can: what else begins so is refused by the gateway, whose plugin sees every request on the way to a pod.

No filter of these routes may touch x-context-identity or x-gateway-destination-endpoint: routes change headers after the
plugin has set them.

dict "root" $ "backend" (a backendRef)
*/}}
{{- define "context-cache.envoy.routes" -}}
{{- $fullname := include "context-cache.fullname" .root }}
{{- $labels := include "context-cache.labels" (dict "root" .root "component" "envoy") }}
{{- $settings := include "context-cache.envoy.settings" .root | fromJson }}
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
        {{- range $path := list "/healthz" "/readyz" "/openapi.json" "/docs" }}
        - path: {type: Exact, value: {{ $path }}}
        {{- end }}
      timeouts:
        request: 30s
      backendRefs:
        - name: {{ $fullname }}-gateway
          port: {{ .root.Values.gateway.service.port }}
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
        {{- range $path := $settings.inferencePaths }}
        - path: {type: Exact, value: {{ $path }}}
          method: POST
        {{- end }}
        {{- range $call := $settings.enginePaths }}
        - path: {type: Exact, value: {{ index (splitList " " $call) 1 | quote }}}
          method: {{ index (splitList " " $call) 0 }}
        {{- end }}
      timeouts:
        request: {{ printf "%.0fs" (minf 99999 $settings.totalTimeoutS) }}
      backendRefs:
        - {{- toYaml .backend | nindent 10 }}
{{- end }}
