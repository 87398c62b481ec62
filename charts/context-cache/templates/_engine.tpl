{{/*
What makes a pod with vLLM one of the release's: kv-sidecar and turn process beside it, the sockets by which they meet, and
the connector's configuration. engine.yaml uses it for the chart's own pods; the injector gets the same text as data and
patches it into others. All take the root and give YAML lists, transferConfig a JSON object.

The three containers should run as one user: vLLM and the turn process open sockets that are files of the sidecar.
*/}}

{{/*
Bytes in a Kubernetes quantity, as an integer: dict "name" "sidecar.memoryLimit" "value" "4Gi". Settings of processes are
plain numbers of bytes. Kubernetes itself may store a quantity with m (0.1Gi is 107374182400m) or Ei.
*/}}
{{- define "context-cache.bytes" -}}
{{- $text := ternary .value (.value | toJson) (kindIs "string" .value) }}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?([eE][0-9]+|m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$" $text) }}
{{- fail (printf "%s: must be an amount of bytes, such as 4Gi or 500M; got %s" .name $text) }}
{{- end }}
{{- $unit := regexFind "[A-Za-z]*$" $text }}
{{- $units := dict "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- $number := trimSuffix $unit $text | float64 }}
{{- if $unit }}{{ $number = mulf $number (get $units $unit) }}{{ end }}
{{- printf "%.0f" (floor $number) }}
{{- end }}

{{/* Ports of the sidecar's events and of their replays, a JSON list; empty: no events. Takes the root. */}}
{{- define "context-cache.sidecar.eventPorts" -}}
{{- $port := get (.Values.sidecar.settings | default dict) "eventsListen" | default "" | regexFind "[0-9]+$" | int }}
{{- ternary (list $port (add1 $port)) list (gt $port 0) | toJson }}
{{- end }}

{{/*
A native sidecar: it is ready before vLLM starts and gets SIGTERM after vLLM has ended, so the last saves find it. It
has no readiness probe, which would count for the whole pod: without it vLLM still answers, it only computes more.
*/}}
{{- define "context-cache.sidecar.container" -}}
- name: kv-sidecar
  {{- include "context-cache.container" (dict "root" . "values" dict) | nindent 2 }}
  restartPolicy: Always
  args: [serve, sidecar]
  env:
    - name: SIDECAR_UNIX_SOCKET
      value: /run/context-cache/sidecar.sock
    - name: SIDECAR_LISTEN
      {{- /* Where LMCache keeps KV the turn process answers gateways at that port. */}}
      value: {{ ternary "" (printf "0.0.0.0:%d" (int .Values.discovery.sidecarPort)) (ne "" (include "context-cache.engine.lmcache" .)) | quote }}
    - name: SIDECAR_MEMORY_LIMIT_BYTES
      value: {{ include "context-cache.bytes" (dict "name" "sidecar.memoryLimit" "value" .Values.sidecar.memoryLimit) | quote }}
    - name: SIDECAR_DISK_LIMIT_BYTES
      value: {{ include "context-cache.bytes" (dict "name" "sidecar.diskLimit" "value" .Values.sidecar.diskLimit) | quote }}
    - name: SIDECAR_MANAGER
      value: {{ include "context-cache.manager.address" . | quote }}
    - name: SIDECAR_PEERS
      value: {{ include "context-cache.sidecar.peers" . | quote }}
    {{- /* When the pod ends its peers take its contexts over, and the manager hears which pod has them. */}}
    - name: SIDECAR_ENDPOINT_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    - name: SIDECAR_DATA_DIR
      {{- /* A node's directory holds one for each pod of each namespace: two sidecars never share one. */}}
      value: {{ ternary (printf "/var/lib/context-cache/%s/$(SIDECAR_ENDPOINT_NAME)" .Release.Namespace) "/var/lib/context-cache" (eq .Values.sidecar.storage.type "hostPath") | quote }}
    - name: POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    - name: SIDECAR_HANDOVER_ADDRESS
      value: "$(POD_IP):{{ .Values.discovery.sidecarPort }}"
    - name: SIDECAR_HANDOVER_PEERS
      value: {{ include "context-cache.sidecar.takers" . | quote }}
    - name: SIDECAR_METRICS_HOST
      value: 0.0.0.0
    - name: SIDECAR_METRICS_PORT
      value: "9091"
    - name: SIDECAR_LOG_LEVEL
      value: {{ .Values.logLevel }}
    {{- include "context-cache.tls.env" (dict "root" . "prefix" "SIDECAR_") | nindent 4 }}
    {{- include "context-cache.traces.env" (dict "root" . "prefix" "SIDECAR_") | nindent 4 }}
    {{- include "context-cache.settingsEnv" (dict "prefix" "SIDECAR_" "settings" .Values.sidecar.settings) | nindent 4 }}
    {{- with .Values.sidecar.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- if not (include "context-cache.engine.lmcache" .) }}
    - name: kv-grpc
      containerPort: {{ .Values.discovery.sidecarPort }}
    {{- end }}
    - name: kv-metrics
      containerPort: 9091
    {{- range $number, $port := include "context-cache.sidecar.eventPorts" . | fromJsonArray }}
    - name: {{ ternary "kv-events" "kv-replays" (eq $number 0) }}
      containerPort: {{ $port }}
    {{- end }}
  {{- /* Plain HTTP, as kubelets have no certificate. A start reads every manifest on the disk first. */}}
  startupProbe:
    httpGet:
      path: /healthz
      port: kv-metrics
    periodSeconds: 2
    timeoutSeconds: 5
    failureThreshold: 150
  livenessProbe:
    httpGet:
      path: /healthz
      port: kv-metrics
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  {{- /* The memory that both containers use (memoryLimit) counts here, in full and from the start on. */}}
  resources:
    {{- include "context-cache.sidecar.resources" . | nindent 4 }}
  volumeMounts:
    - name: kv-run
      mountPath: /run/context-cache
    - name: kv-blocks
      mountPath: /var/lib/context-cache
    {{- include "context-cache.tls.mount" . | nindent 4 }}
    {{- with .Values.sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Its resources. Blocks in an emptyDir lie on the node's disk: asked for, or the pod is evicted when that is full. */}}
{{- define "context-cache.sidecar.resources" -}}
{{- $asked := dict }}
{{- if eq .Values.sidecar.storage.type "emptyDir" }}
{{- $asked = dict "requests" (dict "ephemeral-storage" .Values.sidecar.storage.size) }}
{{- end }}
{{- merge (deepCopy (.Values.sidecar.resources | default dict)) $asked | toYaml }}
{{- end }}

{{/* Whom the sidecar may pull from, a JSON list. Pods come and go, so it cannot list them. */}}
{{- define "context-cache.sidecar.peers" -}}
{{- if or (not .Values.sidecar.peers) (include "context-cache.engine.lmcache" .) }}
{{- list | toJson }}
{{- else }}
{{- .Values.sidecar.peerNetworks | default (list "*") | toJson }}
{{- end }}
{{- end }}

{{/* Who may take its contexts over when it ends, a JSON list: what the Service of the engines resolves to then. */}}
{{- define "context-cache.sidecar.takers" -}}
{{- $engines := include "context-cache.serviceHost" (dict "root" . "service" "engines") }}
{{- ternary (list (printf "%s:%d" $engines (int .Values.discovery.sidecarPort))) list (and .Values.sidecar.peers (not (include "context-cache.engine.lmcache" .))) | toJson }}
{{- end }}

{{/*
Volumes of a pod with vLLM: the sockets, the sidecar's disk, and the Secrets that its containers read. dict "root" $
"claimed" whether the pod's StatefulSet claims the disk; injected pods have none that does, theirs goes with the pod.
*/}}
{{- define "context-cache.sidecar.volumes" -}}
- name: kv-run
  emptyDir: {}
{{- with .root.Values.sidecar.storage }}
{{- if not (and (eq .type "pvc") $.claimed) }}
- name: kv-blocks
  {{- if eq .type "hostPath" }}
  hostPath:
    path: {{ .hostPath | quote }}
    type: Directory
  {{- else if has .type (list "ephemeral" "pvc") }}
  ephemeral:
    volumeClaimTemplate:
      {{- include "context-cache.engine.claim" . | nindent 6 }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .size | toJson }}
  {{- end }}
{{- end }}
{{- end }}
{{ include "context-cache.signing.volume" .root }}
{{ include "context-cache.tls.volume" .root }}
{{- with .root.Values.sidecar.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What a volume of a pod's own asks for: takes what has size and storageClassName. */}}
{{- define "context-cache.engine.claim" -}}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .storageClassName }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources:
    requests:
      storage: {{ .size | toJson }}
{{- end }}

{{/*
The chart's own engines, a JSON list of component, values and kind: `engine` if it has a model, and one for each of
`models`, which says what differs. A name that clients use is one model's. The kind is StatefulSet where a sidecar's disk
outlives its pod.
*/}}
{{- define "context-cache.engines" -}}
{{- $all := list }}
{{- if .Values.engine.model }}{{ $all = append $all (dict "component" "engine" "values" .Values.engine) }}{{ end }}
{{- range $name, $differs := .Values.models }}
{{- $values := mergeOverwrite (deepCopy $.Values.engine) (dict "model" "" "servedModelName" "") $differs }}
{{- /* null: another manager's number. Helm takes it out where values.yaml has the key, which it has not of a model. */}}
{{- if and (hasKey $differs "replicas") (kindIs "invalid" $differs.replicas) }}{{ $_ := unset $values "replicas" }}{{ end }}
{{- $all = append $all (dict "component" (printf "engine-%s" $name) "values" $values) }}
{{- end }}
{{- range $all }}
{{- $sidecar := or (not (dig "lmcacheUrl" "" (.values.turn | default dict))) .values.lmcache.secondTier }}
{{- $stays := and $sidecar (has $.Values.sidecar.storage.type (list "pvc" "hostPath")) }}
{{- $_ := set . "kind" (ternary "StatefulSet" "Deployment" $stays) }}
{{- end }}
{{- $all | toJson }}
{{- end }}

{{/*
The turn process. A plain container, no native sidecar: it gets SIGTERM together with vLLM. It then refuses new turns, and
vLLM waits for the running ones (--shutdown-timeout). Liveness is its own; readiness is vLLM's, asked through it.
*/}}
{{- define "context-cache.turn.container" -}}
{{- $scheme := ternary "HTTPS" "HTTP" .Values.tls.enabled }}
- name: turn
  {{- include "context-cache.container" (dict "root" . "values" dict) | nindent 2 }}
  args: [serve, turn]
  env:
    - name: TURN_LISTEN_HOST
      value: 0.0.0.0
    - name: TURN_LISTEN_PORT
      value: {{ .Values.discovery.turnPort | quote }}
    - name: TURN_ENGINE_URL
      value: {{ printf "%s://127.0.0.1:%d" (lower $scheme) (int .Values.discovery.port) | quote }}
    - name: TURN_MANAGER
      value: {{ include "context-cache.manager.address" . | quote }}
    {{- if include "context-cache.engine.lmcache" . }}
    {{- include "context-cache.engine.hostIp" . | nindent 4 }}
    - name: TURN_LMCACHE_MODEL
      value: {{ .Values.engine.model | quote }}
    - name: TURN_LMCACHE_WORLD_SIZE
      value: {{ .Values.engine.tensorParallelSize | quote }}
    - name: TURN_LMCACHE_LISTEN
      value: "0.0.0.0:{{ .Values.discovery.sidecarPort }}"
    {{- else }}
    - name: TURN_SIDECAR
      value: unix:///run/context-cache/sidecar.sock
    {{- end }}
    - name: TURN_SECRET_FILE
      value: /etc/context-cache/signing/secret
    {{- /* The gateway finds pods in EndpointSlices, under the same name. */}}
    - name: TURN_ENDPOINT_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    {{- if not (hasKey (.Values.engine.turn | default dict) "drainTimeoutS") }}
    {{- /* What vLLM leaves without an end when its own time is over, the turn process ends. */}}
    - name: TURN_DRAIN_TIMEOUT_S
      value: {{ .Values.engine.shutdownTimeoutS | quote }}
    {{- end }}
    - name: TURN_LOG_LEVEL
      value: {{ .Values.logLevel }}
    {{- include "context-cache.tls.env" (dict "root" . "prefix" "TURN_") | nindent 4 }}
    {{- include "context-cache.traces.env" (dict "root" . "prefix" "TURN_") | nindent 4 }}
    {{- include "context-cache.settingsEnv" (dict "prefix" "TURN_" "settings" .Values.engine.turn) | nindent 4 }}
  ports:
    - name: turn
      containerPort: {{ .Values.discovery.turnPort }}
    {{- if include "context-cache.engine.lmcache" . }}
    {{- /* Gateways delete a context through the pod that has it. */}}
    - name: kv-grpc
      containerPort: {{ .Values.discovery.sidecarPort }}
    {{- end }}
  startupProbe:
    httpGet:
      path: /healthz
      port: turn
      scheme: {{ $scheme }}
    periodSeconds: 2
    timeoutSeconds: 5
    failureThreshold: 60
  livenessProbe:
    httpGet:
      path: /healthz
      port: turn
      scheme: {{ $scheme }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet:
      path: /health
      port: turn
      scheme: {{ $scheme }}
    periodSeconds: 5
    timeoutSeconds: {{ .Values.engine.probes.timeoutS }}
    failureThreshold: 3
  lifecycle:
    {{- include "context-cache.engine.preStop" . | nindent 4 }}
  resources:
    {{- toYaml .Values.engine.turnResources | nindent 4 }}
  volumeMounts:
    {{- include "context-cache.engine.mounts" . | nindent 4 }}
{{- end }}

{{/* Hook of vLLM and of the turn process. Endpoints are taken out first; requests that are on their way still arrive. */}}
{{- define "context-cache.engine.preStop" -}}
preStop:
  sleep:
    seconds: {{ .Values.engine.preStopSleepS }}
{{- end }}

{{/* Named before what may be made of it: $(HOST_IP) is LMCache's server where each node has one. */}}
{{- define "context-cache.engine.hostIp" -}}
- name: HOST_IP
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
{{- end }}

{{/* Not empty where LMCache keeps KV, in the place of connector and sidecar. */}}
{{- define "context-cache.engine.lmcache" -}}
{{- dig "lmcacheUrl" "" (.Values.engine.turn | default dict) }}
{{- end }}

{{/* Volumes of a pod with vLLM and the turn process, but without a sidecar. */}}
{{- define "context-cache.engine.volumes" -}}
- name: kv-run
  emptyDir: {}
{{ include "context-cache.signing.volume" . }}
{{ include "context-cache.tls.volume" . }}
{{- end }}

{{/* Mounts of vLLM and of the turn process. They see no block as a file: KV lies in memory of the sidecar's. */}}
{{- define "context-cache.engine.mounts" -}}
- name: kv-run
  mountPath: /run/context-cache
{{ include "context-cache.signing.mount" . }}
{{ include "context-cache.tls.mount" . }}
{{- end }}

{{/* The value of --kv-transfer-config. A load that fails costs time, never an answer: recompute. */}}
{{- define "context-cache.engine.transferConfig" -}}
{{- if include "context-cache.engine.lmcache" . }}
{{- dict
  "kv_connector" "LMCacheMPConnector"
  "kv_role" "kv_both"
  "kv_load_failure_policy" "recompute"
  "kv_connector_extra_config" .Values.engine.lmcache.connector | toJson }}
{{- else }}
{{- $own := dict "sidecar" "unix:///run/context-cache/sidecar.sock" "secret_file" "/etc/context-cache/signing/secret" }}
{{- with .Values.tracing.endpoint }}{{ $_ := set $own "traces_endpoint" . }}{{ end }}
{{- dict
  "kv_connector" "ContextCacheConnector"
  "kv_connector_module_path" "vllm_plugin.connector"
  "kv_role" "kv_both"
  "kv_load_failure_policy" "recompute"
  "kv_connector_extra_config" (merge (dict) $own .Values.engine.connector) | toJson }}
{{- end }}
{{- end }}

{{/*
Stops with a readable message where the sidecar's values contradict each other: beside the chart's engine and in injected
pods.
*/}}
{{- define "context-cache.sidecar.check" -}}
{{- $memory := include "context-cache.bytes" (dict "name" "sidecar.memoryLimit" "value" .Values.sidecar.memoryLimit) | float64 }}
{{- $disk := include "context-cache.bytes" (dict "name" "sidecar.diskLimit" "value" .Values.sidecar.diskLimit) | float64 }}
{{- $size := include "context-cache.bytes" (dict "name" "sidecar.storage.size" "value" .Values.sidecar.storage.size) | float64 }}
{{- if ge $disk $size }}
{{- fail (printf "sidecar.diskLimit (%v) must be less than sidecar.storage.size (%v): manifests and unfinished files need room too" .Values.sidecar.diskLimit .Values.sidecar.storage.size) }}
{{- end }}
{{- with dig "limits" "memory" "" (.Values.sidecar.resources | default dict) }}
{{- /* Beside the arena: the process, and a block file for each thread and each stream of frames. */}}
{{- if lt (include "context-cache.bytes" (dict "name" "sidecar.resources.limits.memory" "value" .) | float64) (addf $memory 536870912.0) }}
{{- fail (printf "sidecar.resources.limits.memory (%v) must exceed sidecar.memoryLimit (%v) by 512Mi or more. The sidecar takes memoryLimit at its start and needs memory of its own. It would be killed" . $.Values.sidecar.memoryLimit) }}
{{- end }}
{{- end }}
{{- if eq .Values.sidecar.storage.type "hostPath" }}
{{- if not .Values.sidecar.storage.hostPath }}
{{- fail "sidecar.storage.hostPath: required with sidecar.storage.type hostPath. It is a directory of the nodes" }}
{{- end }}
{{- if .Values.injector.enabled }}
{{- fail "sidecar.storage.type hostPath works for the chart's own engines only, whose pods keep their names. With injector.enabled every new pod would leave a directory on the node. Use the type ephemeral or emptyDir" }}
{{- end }}
{{- end }}
{{- end }}
