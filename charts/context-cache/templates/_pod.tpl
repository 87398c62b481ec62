{{/*
What the release's pods have in common. Definitions that take a component get dict "root" $ "component" "gateway"
"values" .Values.gateway, whose `pod` overrides podDefaults.
*/}}

{{/* `podDefaults` with the component's `pod` over them, a JSON object. Takes the dict above. */}}
{{- define "context-cache.podValues" -}}
{{- mergeOverwrite (deepCopy .root.Values.podDefaults) (deepCopy (.values.pod | default dict)) | toJson }}
{{- end }}

{{/*
Labels and annotations of a pod template: the dict above, and optionally "labels" and "annotations" (dicts). The chart's
version is not among the labels: a new chart that changes nothing restarts nothing.
*/}}
{{- define "context-cache.podMetadata" -}}
{{- $pod := include "context-cache.podValues" . | fromJson }}
labels:
  {{- include "context-cache.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/part-of: context-cache
  {{- with merge (dict) (.labels | default dict) ($pod.labels | default dict) (.root.Values.commonLabels | default dict) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) ($pod.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Fields that the specs of all pods have. Variables of Services, such as MY_RELEASE_GATEWAY_PORT, must not meet the names of
settings. Pods spread by hash of their template: the old pods of a rollout do not count.
*/}}
{{- define "context-cache.podSpec" -}}
{{- $pod := include "context-cache.podValues" . | fromJson }}
{{- $spec := dict "enableServiceLinks" false "securityContext" $pod.securityContext }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "imagePullSecrets" }}
{{- with get $pod $key }}{{ $_ := set $spec $key . }}{{ end }}
{{- end }}
{{- $selector := dict "matchLabels" (include "context-cache.selectorLabels" . | fromYaml) }}
{{- range $pod.topologySpreadConstraints }}
{{- $constraint := merge (dict "labelSelector" $selector "matchLabelKeys" (list "pod-template-hash")) . }}
{{- $_ := set $spec "topologySpreadConstraints" (append (get $spec "topologySpreadConstraints" | default list) $constraint) }}
{{- end }}
{{- toYaml $spec }}
{{- end }}

{{/*
Fields that all containers have: the dict above, and optionally "image", a section of the values; default: ours. For
containers of ours beside vLLM, which podDefaults alone describe, "values" is an empty dict.
*/}}
{{- define "context-cache.container" -}}
image: {{ include "context-cache.image" (dict "root" .root "image" (.image | default .root.Values.image)) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  {{- (include "context-cache.podValues" . | fromJson).containerSecurityContext | toYaml | nindent 2 }}
{{- end }}

{{/*
Env items of a settings map: dict "prefix" "GATEWAY_" "settings" .Values.gateway.settings. tenantRatePerS becomes
GATEWAY_TENANT_RATE_PER_S. Numbers go through JSON: Helm reads 33554432 as a float and would print 3.3554432e+07.
*/}}
{{- define "context-cache.settingsEnv" -}}
{{- $prefix := .prefix }}
{{- range $key, $value := .settings }}
- name: {{ $prefix }}{{ regexReplaceAll "[A-Z]" $key "_${0}" | upper }}
  value: {{ ternary $value ($value | toJson) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}

{{/* Env items of the values (extraEnv). Takes the dict above. */}}
{{- define "context-cache.extraEnv" -}}
{{- with (include "context-cache.podValues" . | fromJson).extraEnv }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* Env items that turn mutual TLS on in a part, or nothing: dict "root" $ "prefix" "GATEWAY_". */}}
{{- define "context-cache.tls.env" -}}
{{- if .root.Values.tls.enabled -}}
- name: {{ .prefix }}TLS_CERT_FILE
  value: /etc/context-cache/tls/tls.crt
- name: {{ .prefix }}TLS_KEY_FILE
  value: /etc/context-cache/tls/tls.key
- name: {{ .prefix }}TLS_CA_FILE
  value: /etc/context-cache/tls/ca.crt
- name: {{ .prefix }}TLS_SERVER_NAME
  value: {{ .root.Values.tls.serverName | quote }}
{{- end }}
{{- end }}

{{/* The volume with those files (a list item), or nothing. Takes the root. No subPath: rotated files must arrive. */}}
{{- define "context-cache.tls.volume" -}}
{{- if .Values.tls.enabled -}}
- name: tls
  secret:
    secretName: {{ include "context-cache.tls.secretName" . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "context-cache.tls.mount" -}}
{{- if .Values.tls.enabled -}}
- name: tls
  mountPath: /etc/context-cache/tls
  readOnly: true
{{- end }}
{{- end }}

{{/* Env items that send spans, or nothing: dict "root" $ "prefix" "GATEWAY_". */}}
{{- define "context-cache.traces.env" -}}
{{- if .root.Values.tracing.endpoint -}}
- name: {{ .prefix }}TRACES_ENDPOINT
  value: {{ .root.Values.tracing.endpoint | quote }}
- name: {{ .prefix }}TRACES_SAMPLE_RATIO
  value: {{ .root.Values.tracing.sampleRatio | toJson | quote }}
{{- end }}
{{- end }}

{{/* The deployment's signing secret: a volume (list item) and its mount. Takes the root. */}}
{{- define "context-cache.signing.volume" -}}
- name: signing
  secret:
    secretName: {{ include "context-cache.signing.secretName" . | quote }}
    defaultMode: 0440
    items:
      - key: {{ include "context-cache.signing.secretKey" . | quote }}
        path: secret
{{- end }}

{{- define "context-cache.signing.mount" -}}
- name: signing
  mountPath: /etc/context-cache/signing
  readOnly: true
{{- end }}

{{/* The hashes of the API keys: a volume (list item) and its mount. Takes the root. The file is read again. */}}
{{- define "context-cache.auth.volume" -}}
- name: keys
  secret:
    secretName: {{ include "context-cache.auth.secretName" . | quote }}
    defaultMode: 0440
    items:
      - key: {{ include "context-cache.auth.secretKey" . | quote }}
        path: api-keys.json
{{- end }}

{{- define "context-cache.auth.mount" -}}
- name: keys
  mountPath: /etc/context-cache/keys
  readOnly: true
{{- end }}

{{/* Env items of a context manager that say where Redis is. Takes the root. */}}
{{- define "context-cache.redis.env" -}}
- name: MANAGER_REDIS_URL
  {{- if include "context-cache.redis.secretName" . }}
  valueFrom:
    secretKeyRef:
      name: {{ include "context-cache.redis.secretName" . | quote }}
      key: {{ include "context-cache.redis.secretKey" . | quote }}
  {{- else }}
  value: {{ .Values.redis.url | quote }}
  {{- end }}
{{- if .Values.redis.tlsSecret }}
- name: MANAGER_REDIS_CA_FILE
  value: /etc/context-cache/redis-tls/ca.crt
{{- if .Values.redis.clientCertificate }}
- name: MANAGER_REDIS_CERT_FILE
  value: /etc/context-cache/redis-tls/tls.crt
- name: MANAGER_REDIS_KEY_FILE
  value: /etc/context-cache/redis-tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- define "context-cache.redis.volume" -}}
{{- with .Values.redis.tlsSecret -}}
- name: redis-tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "context-cache.redis.mount" -}}
{{- if .Values.redis.tlsSecret -}}
- name: redis-tls
  mountPath: /etc/context-cache/redis-tls
  readOnly: true
{{- end }}
{{- end }}

{{/*
The PodDisruptionBudget of a component, or nothing. AlwaysAllow: pods that are not ready anyhow must not keep a node from
being drained.
*/}}
{{- define "context-cache.pdb" -}}
{{- $pdb := (include "context-cache.podValues" . | fromJson).pdb }}
{{- if $pdb.enabled -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "context-cache.fullname" .root }}-{{ .component }}
  labels:
    {{- include "context-cache.labels" . | nindent 4 }}
  {{- include "context-cache.annotations" . | nindent 2 }}
spec:
  maxUnavailable: {{ $pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "context-cache.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* The HorizontalPodAutoscaler of a component's Deployment, or nothing. */}}
{{- define "context-cache.autoscaling" -}}
{{- if .values.autoscaling.enabled -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "context-cache.fullname" .root }}-{{ .component }}
  labels:
    {{- include "context-cache.labels" . | nindent 4 }}
  {{- include "context-cache.annotations" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "context-cache.fullname" .root }}-{{ .component }}
  minReplicas: {{ .values.autoscaling.minReplicas }}
  maxReplicas: {{ .values.autoscaling.maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target:
          type: Utilization
          averageUtilization: {{ .values.autoscaling.targetCPUUtilizationPercentage }}
{{- end }}
{{- end }}
