{{/*
Names, labels, images, and where the release's Secrets are. What pods have in common is in _pod.tpl.
*/}}

{{- define "context-cache.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/*
Name that every object of the release begins with: a DNS label of at most 40 characters, so that it stays one with the
longest suffix. A release's name may be longer, hold dots or begin with a digit; it is made to fit and ends in a hash, as
two releases whose names become alike must not share objects.
*/}}
{{- define "context-cache.fullname" -}}
{{- $full := .Values.fullnameOverride }}
{{- if not $full }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- end }}
{{- $fitting := $full | replace "." "-" }}
{{- if not (regexMatch "^[a-z]" $fitting) }}
{{- $fitting = printf "r-%s" $fitting }}
{{- end }}
{{- if or (ne $fitting $full) (gt (len $fitting) 40) }}
{{- $fitting = printf "%s-%s" ($fitting | trunc 31 | trimSuffix "-") (sha256sum $full | trunc 8) }}
{{- end }}
{{- $fitting }}
{{- end }}

{{/* Labels of an object: dict "root" $ "component" "gateway"; without a component those of the release. */}}
{{- define "context-cache.labels" -}}
{{ include "context-cache.selectorLabels" . }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: context-cache
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels that a component's pods are selected by; the same dict. They never change in the life of a release. */}}
{{- define "context-cache.selectorLabels" -}}
app.kubernetes.io/name: {{ include "context-cache.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* The annotations block of an object: dict "root" $ "annotations" (dict …), the latter optional; or nothing. */}}
{{- define "context-cache.annotations" -}}
{{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Reference of an image: dict "root" $ "image" .Values.x.image. Registry and tag default to those of the release; a
digest decides over a tag. Without any registry it is the node's default one.
*/}}
{{- define "context-cache.image" -}}
{{- $registry := default .root.Values.image.registry .image.registry }}
{{- $name := ternary (printf "%s/%s" $registry .image.repository) .image.repository (ne $registry "") }}
{{- if .image.digest }}
{{- printf "%s@%s" $name .image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{/*
ServiceAccount of a component with rights: dict "root" $ "component" "gateway". Without serviceAccount.create somebody else
made it under the same name.
*/}}
{{- define "context-cache.serviceAccountName" -}}
{{- printf "%s-%s" (include "context-cache.fullname" .root) .component }}
{{- end }}

{{/* Fully qualified name of a Service of the release: dict "root" $ "service" "context-manager". */}}
{{- define "context-cache.serviceHost" -}}
{{- printf "%s-%s.%s.svc.%s" (include "context-cache.fullname" .root) .service .root.Release.Namespace .root.Values.clusterDomain }}
{{- end }}

{{/*
gRPC address of the context managers. Their Service is headless and the clients balance (round robin over all addresses):
one HTTP/2 connection through a ClusterIP would stay with one manager for ever.
*/}}
{{- define "context-cache.manager.address" -}}
{{- printf "dns:///%s:50051" (include "context-cache.serviceHost" (dict "root" . "service" "context-manager")) }}
{{- end }}

{{- define "context-cache.signing.secretName" -}}
{{- default (printf "%s-signing" (include "context-cache.fullname" .)) .Values.signing.existingSecret }}
{{- end }}

{{/* Key of the signing secret in it. */}}
{{- define "context-cache.signing.secretKey" -}}
{{- ternary .Values.signing.secretKey "secret" (ne .Values.signing.existingSecret "") }}
{{- end }}

{{/* Secret with the hashes of the API keys. The key itself, when the chart made one, is in the Secret …-api-key. */}}
{{- define "context-cache.auth.secretName" -}}
{{- default (printf "%s-api-keys" (include "context-cache.fullname" .)) .Values.auth.existingSecret }}
{{- end }}

{{- define "context-cache.auth.secretKey" -}}
{{- ternary .Values.auth.secretKey "api-keys.json" (ne .Values.auth.existingSecret "") }}
{{- end }}

{{/* Secret with one API key in plain text, for the smoke test: the generated one, one named in tests, or nothing. */}}
{{- define "context-cache.auth.plainSecretName" -}}
{{- if .Values.tests.apiKeySecret }}
{{- .Values.tests.apiKeySecret }}
{{- else if not .Values.auth.existingSecret }}
{{- printf "%s-api-key" (include "context-cache.fullname" .) }}
{{- end }}
{{- end }}

{{/* Secret with tls.crt, tls.key and ca.crt of the release's parts. */}}
{{- define "context-cache.tls.secretName" -}}
{{- default (printf "%s-tls" (include "context-cache.fullname" .)) .Values.tls.existingSecret }}
{{- end }}

{{/* Something when the release has a Valkey of its own: when no other store is named. */}}
{{- define "context-cache.valkey" -}}
{{- if not (or .Values.redis.url .Values.redis.existingSecret) }}yes{{ end }}
{{- end }}

{{/* Secret with the whole Redis URL, or nothing when the URL stands in the values. */}}
{{- define "context-cache.redis.secretName" -}}
{{- if include "context-cache.valkey" . }}
{{- printf "%s-valkey" (include "context-cache.fullname" .) }}
{{- else }}
{{- .Values.redis.existingSecret }}
{{- end }}
{{- end }}

{{- define "context-cache.redis.secretKey" -}}
{{- ternary "redis-url" .Values.redis.secretKey (ne "" (include "context-cache.valkey" .)) }}
{{- end }}

{{/*
What a key of a Secret of the release holds already, else the given value: dict "root" $ "name" … "key" … "value" …
*/}}
{{- define "context-cache.keptOr" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name | default dict }}
{{- $kept := dig "data" .key "" $found }}
{{- ternary ($kept | b64dec) .value (ne $kept "") }}
{{- end }}

{{/*
URL that pods of the cluster reach the release by: Envoy, or the gateway's HTTP front where Envoy is none of ours. The
latter answers the same, so it is what the smoke test asks behind somebody else's Gateway.
*/}}
{{- define "context-cache.front.url" -}}
{{- if eq .Values.envoy.mode "proxy" }}
{{- $scheme := ternary "https" "http" (ne .Values.envoy.tls.existingSecret "") }}
{{- printf "%s://%s:%d" $scheme (include "context-cache.serviceHost" (dict "root" . "service" "envoy")) (include "context-cache.front.port" . | int) }}
{{- else }}
{{- $scheme := ternary "https" "http" .Values.tls.enabled }}
{{- printf "%s://%s:%d" $scheme (include "context-cache.serviceHost" (dict "root" . "service" "gateway")) (include "context-cache.gateway.port" . | int) }}
{{- end }}
{{- end }}

{{/* Port of the gateway's Service. Takes the root. */}}
{{- define "context-cache.gateway.port" -}}
{{- .Values.gateway.service.port | default 8000 }}
{{- end }}

{{/* Type of a Service, and the networks that its load balancer admits. Takes `service` of a component. */}}
{{- define "context-cache.serviceType" -}}
type: {{ .type }}
{{- if and .loadBalancerSourceRanges (eq .type "LoadBalancer") }}
loadBalancerSourceRanges:
  {{- toYaml .loadBalancerSourceRanges | nindent 2 }}
{{- end }}
{{- end }}

{{/* Port of the Service that clients use. Envoy's is 80, or 443 with HTTPS, unless values say another. */}}
{{- define "context-cache.front.port" -}}
{{- if ne .Values.envoy.mode "proxy" }}
{{- include "context-cache.gateway.port" . }}
{{- else }}
{{- .Values.envoy.service.port | default (ternary 443 80 (ne .Values.envoy.tls.existingSecret "")) }}
{{- end }}
{{- end }}
