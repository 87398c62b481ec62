{{/*
The chart's own vLLM container: what injected pods bring themselves. All take the root.
*/}}

{{/* Arguments of vLLM. */}}
{{- define "context-cache.engine.args" -}}
{{- $engine := .Values.engine }}
- {{ printf "--model=%s" $engine.model | quote }}
- --host=0.0.0.0
- --port={{ .Values.discovery.port }}
{{- with $engine.servedModelName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
- --tensor-parallel-size={{ $engine.tensorParallelSize }}
- {{ printf "--dtype=%s" $engine.dtype | quote }}
- --block-size={{ $engine.blockSize }}
{{- if $engine.maxModelLen }}
- --max-model-len={{ $engine.maxModelLen | int64 }}
{{- end }}
- --shutdown-timeout={{ $engine.shutdownTimeoutS }}
{{- /* Usage says how many tokens were found in the cache: it is what a context's receipt is made from. */}}
- --enable-prompt-tokens-details
- {{ printf "--kv-transfer-config=%s" (include "context-cache.engine.transferConfig" .) | quote }}
{{- if .Values.tls.enabled }}
{{- /* vLLM shows a certificate and asks for none, as kubelets that probe it have none. Sessions are guarded by the signed
header, everything else by the NetworkPolicy. */}}
- --ssl-certfile=/etc/context-cache/tls/tls.crt
- --ssl-keyfile=/etc/context-cache/tls/tls.key
- --enable-ssl-refresh
{{- end }}
{{- range $engine.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Environment. What extraEnv says wins: no name may stand twice. */}}
{{- define "context-cache.engine.ownEnv" -}}
{{- $engine := .Values.engine }}
{{- $env := dict
  "HF_HOME" $engine.modelCache.mountPath
  "VLLM_NO_USAGE_STATS" "1"
  "DO_NOT_TRACK" "1" }}
{{- /* Caches of compilers go under HOME. PyTorch asks for the user's name, which a UID without an entry in passwd lacks. */}}
{{- $_ := merge $env (dict "HOME" "/tmp" "USER" "context-cache") }}
{{- if eq (int $engine.gpu.count) 0 }}
{{- /* Binding threads to cores needs rights that containers lack. */}}
{{- $_ := merge $env (dict "VLLM_CPU_KVCACHE_SPACE" ($engine.cpuKvCacheGiB | toString) "VLLM_CPU_OMP_THREADS_BIND" "nobind") }}
{{- end }}
{{- $given := list }}
{{- range (include "context-cache.podValues" (dict "root" . "values" $engine) | fromJson).extraEnv }}
{{- $given = append $given .name }}
{{- $_ := unset $env .name }}
{{- end }}
{{- range $name, $value := $env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with $engine.hfTokenSecret }}
{{- if and .name (not (has "HF_TOKEN" $given)) }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Probes of vLLM. Loading a model may take long, which is the startup probe's business; afterwards /health fails when the
engine is dead, and a restart costs minutes, so liveness is patient.
*/}}
{{- define "context-cache.engine.probes" -}}
{{- $probes := .Values.engine.probes }}
{{- $scheme := ternary "HTTPS" "HTTP" .Values.tls.enabled }}
startupProbe:
  httpGet:
    path: /health
    port: http
    scheme: {{ $scheme }}
  periodSeconds: 10
  timeoutSeconds: {{ $probes.timeoutS }}
  failureThreshold: {{ divf $probes.startupS 10 | ceil | int }}
livenessProbe:
  httpGet:
    path: /health
    port: http
    scheme: {{ $scheme }}
  periodSeconds: 10
  timeoutSeconds: {{ $probes.timeoutS }}
  failureThreshold: {{ $probes.livenessFailures }}
readinessProbe:
  httpGet:
    path: /health
    port: http
    scheme: {{ $scheme }}
  periodSeconds: 5
  timeoutSeconds: {{ $probes.timeoutS }}
  failureThreshold: 3
{{- end }}

{{/* Resources of vLLM's container, the accelerators among them: limit and request of these are always equal. */}}
{{- define "context-cache.engine.resources" -}}
{{- $resources := .Values.engine.resources | default dict | deepCopy }}
{{- with .Values.engine.gpu }}
{{- if gt (int .count) 0 }}
{{- $gpus := dict .resource (.count | int) }}
{{- $_ := mergeOverwrite $resources (dict "limits" $gpus "requests" $gpus) }}
{{- end }}
{{- end }}
{{- $models := .Values.engine.modelCache }}
{{- if and $models.emptyDirSize (not (or $models.existingClaim $models.size)) }}
{{- $resources = merge $resources (dict "requests" (dict "ephemeral-storage" $models.emptyDirSize)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Seconds until a pod is killed: the hook, running answers, the sidecar's contexts, and some seconds to end. */}}
{{- define "context-cache.engine.graceS" -}}
{{- $engine := .Values.engine }}
{{- $store := ne "" (dig "storeUrl" "" .Values.sidecar.settings) }}
{{- /* An ending sidecar saves its contexts in the store or to its peers, and drains for 5 s (kv_sidecar DRAIN_S). */}}
{{- $flush := ternary (dig "handoverS" 20.0 .Values.sidecar.settings) 0.0 (or $store (ne "[]" (include "context-cache.sidecar.takers" .))) }}
{{- /* A turn process cancels what outlives its drain, and ends 15 s after that (vllm_plugin/turn/__main__.py). */}}
{{- $turns := addf 15 (dig "drainTimeoutS" $engine.shutdownTimeoutS ($engine.turn | default dict)) }}
{{- addf $engine.preStopSleepS (maxf $engine.shutdownTimeoutS $turns) $flush 5 10 | ceil | int }}
{{- end }}

{{/* Stops with a readable message where the engine's values contradict each other. */}}
{{- define "context-cache.engine.check" -}}
{{- $engine := .Values.engine }}
{{- if not $engine.model }}
{{- fail "models: each entry needs the key model, a name on Hugging Face or a path under engine.modelCache.mountPath" }}
{{- end }}
{{- $tp := int $engine.tensorParallelSize }}
{{- $gpus := int $engine.gpu.count }}
{{- if and (gt $gpus 0) (ne (mod $gpus $tp) 0) }}
{{- fail (printf "engine.gpu.count (%[2]d) must be a multiple of engine.tensorParallelSize (%[1]d): each rank needs a GPU of the pod" $tp $gpus) }}
{{- end }}
{{- if has (trimSuffix "/" $engine.modelCache.mountPath) (list "" "/tmp" "/dev/shm" "/run/context-cache" "/etc/context-cache/signing" "/etc/context-cache/tls") }}
{{- fail (printf "engine.modelCache.mountPath (%s): another volume is mounted there. Choose another path" $engine.modelCache.mountPath) }}
{{- end }}
{{- $tokens := get .Values.sidecar.settings "blockTokens" | default 256 | int }}
{{- if ne (mod $tokens (int $engine.blockSize)) 0 }}
{{- fail (printf "sidecar.settings.blockTokens (%d) must be a multiple of engine.blockSize (%d)" $tokens (int $engine.blockSize)) }}
{{- end }}
{{- if and (eq $gpus 0) (ne (mod (int $engine.blockSize) 32) 0) }}
{{- fail (printf "engine.blockSize (%d) must be a multiple of 32 with engine.gpu.count 0: vLLM's attention on CPUs supports no other block size" (int $engine.blockSize)) }}
{{- end }}
{{- if not (or $engine.rollout.maxSurge $engine.rollout.maxUnavailable) }}
{{- fail "engine.rollout: maxSurge and maxUnavailable must not both be 0. No pod could be replaced" }}
{{- end }}
{{- with dig "limits" "memory" "" ($engine.resources | default dict) }}
{{- if le (include "context-cache.bytes" (dict "name" "engine.resources.limits.memory" "value" .) | float64) (include "context-cache.bytes" (dict "name" "engine.shm.sizeLimit" "value" $engine.shm.sizeLimit) | float64) }}
{{- fail (printf "engine.resources.limits.memory (%v) must exceed engine.shm.sizeLimit (%v), because it includes those pages. vLLM would be killed" . $engine.shm.sizeLimit) }}
{{- end }}
{{- end }}
{{- if include "context-cache.engine.lmcache" . }}
{{- if not (dig "lmcacheCoordinatorUrl" "" $engine.turn) }}
{{- fail "engine.turn.lmcacheUrl needs engine.turn.lmcacheCoordinatorUrl. Without it a deleted context stays in LMCache" }}
{{- end }}
{{- end }}
{{- range $engine.extraArgs }}
{{- /* vLLM takes --tensor_parallel_size and -tp for the same. */}}
{{- $flag := splitList "=" . | first | replace "_" "-" }}
{{- if regexMatch "^(-tp|--(host|port|model|tensor-parallel-size|block-size|kv-transfer-config(\\..*)?|kv-offloading-.*|shutdown-timeout|ssl-[a-z-]+|uds|headless))$" $flag }}
{{- fail (printf "engine.extraArgs: the chart sets %s from other values: engine.model, .tensorParallelSize, .blockSize, .connector, .shutdownTimeoutS, discovery.port, tls" (splitList "=" . | first)) }}
{{- end }}
{{- end }}
{{- end }}
