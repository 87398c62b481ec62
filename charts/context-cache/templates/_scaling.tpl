{{/*
Who decides the number of replicas of a workload (docs/operations/autoscaling.md, ADR 0093).

A manifest without `replicas` is not enough to leave the number alone. Kubernetes sets 1 when Helm's field disappears:
- Server-side apply (Helm 4) removes a field that Helm owns and that the new manifest lacks.
- Client-side apply (Helm 3, and releases that began with it) removes a field that the previous manifest had.
Server-side apply also stops half-way where another manager owns the field and the value differs.

So an upgrade reads the live workload and its managedFields. The values decide as long as no other manager owns the
number. Otherwise the live number stays: without a line where that is safe, else with a line of the live number.

Helm's managers are those that own the annotation meta.helm.sh/release-name: `helm`, or a GitOps tool that contains Helm.
The annotation context-cache.io/replicas says that the manifest has no line, which a client-side upgrade cannot see
otherwise.
*/}}

{{/*
The scaling of a workload, a JSON object. Takes dict "root" $ "component" "gateway" "values" .Values.gateway, and
optionally "kind" (default Deployment).
  spec         {replicas: 3}, or {} for a manifest without a line
  annotations  of the workload
  live         number in the cluster; 0 without a workload
  owner        manager other than Helm that owns the number; empty: none
  asked        number in the values; -1: an autoscaler's, or null
*/}}
{{- define "context-cache.scaling" -}}
{{- $autoscaled := false }}
{{- $least := 0 }}
{{- range list "autoscaling" "keda" }}
{{- with get $.values . }}
{{- if .enabled }}{{ $autoscaled = true }}{{ $least = int .minReplicas }}{{ end }}
{{- end }}
{{- end }}
{{- $asked := -1 }}
{{- if and (not $autoscaled) (hasKey .values "replicas") }}{{ $asked = int .values.replicas }}{{ end }}
{{- $kind := .kind | default "Deployment" }}
{{- $name := printf "%s-%s" (include "context-cache.fullname" .root) .component }}
{{- $found := lookup "apps/v1" $kind .root.Release.Namespace $name }}
{{- $workload := $found | default (include "context-cache.otherKind" . | fromJson) }}
{{- $live := dig "spec" "replicas" 1 $workload | int }}
{{- $entries := dig "metadata" "managedFields" list $workload }}
{{- $clientSide := hasPrefix "v3" .root.Capabilities.HelmVersion.Version }}
{{- $managers := list }}
{{- range $entries }}
{{- if hasKey (dig "f:metadata" "f:annotations" dict (.fieldsV1 | default dict)) "f:meta.helm.sh/release-name" }}
{{- $managers = append $managers .manager }}
{{- if eq .operation "Update" }}{{ $clientSide = true }}{{ end }}
{{- end }}
{{- end }}
{{- $owned := false }}
{{- $owner := "" }}
{{- range $entries }}
{{- if hasKey (dig "f:spec" dict (.fieldsV1 | default dict)) "f:replicas" }}
{{- if has .manager $managers }}{{ $owned = true }}{{ else }}{{ $owner = .manager }}{{ end }}
{{- end }}
{{- end }}
{{- $hadLine := not (dig "metadata" "annotations" "context-cache.io/replicas" "" $found) }}
{{- $spec := dict }}
{{- if and (ge $asked 0) (not $owner) }}
{{- $spec = dict "replicas" $asked }}
{{- else if not $workload }}
{{- else if or (not $found) (ternary $hadLine (and $owned (not $owner)) $clientSide) }}
{{- $spec = dict "replicas" (max $live $least) }}
{{- end }}
{{- dict
  "spec" $spec
  "annotations" (ternary (dict) (dict "context-cache.io/replicas" "left-alone") (hasKey $spec "replicas"))
  "live" (ternary $live 0 (not (empty $workload)))
  "owner" $owner
  "asked" $asked | toJson }}
{{- end }}

{{/*
The workload that an upgrade replaces because its kind changes, a JSON object, or {}: a StatefulSet where the engine is
becoming a Deployment, and the other way round. The same dict; without "kind" there is none.
*/}}
{{- define "context-cache.otherKind" -}}
{{- $workload := dict }}
{{- with .kind }}
{{- $kind := ternary "Deployment" "StatefulSet" (eq . "StatefulSet") }}
{{- $workload = lookup "apps/v1" $kind $.root.Release.Namespace (printf "%s-%s" (include "context-cache.fullname" $.root) $.component) }}
{{- end }}
{{- $workload | default dict | toJson }}
{{- end }}

{{/* Lines of the notes, a JSON list: each workload whose number another manager owns. Takes the root. */}}
{{- define "context-cache.scaledByOthers" -}}
{{- $parts := list
  (dict "component" "gateway" "values" .Values.gateway)
  (dict "component" "context-manager" "values" .Values.contextManager) }}
{{- if eq .Values.envoy.mode "proxy" }}{{ $parts = append $parts (dict "component" "envoy" "values" .Values.envoy) }}{{ end }}
{{- if .Values.injector.enabled }}{{ $parts = append $parts (dict "component" "injector" "values" .Values.injector) }}{{ end }}
{{- $lines := list }}
{{- range concat $parts (include "context-cache.engines" . | fromJsonArray) }}
{{- $scaling := include "context-cache.scaling" (merge (dict "root" $) .) | fromJson }}
{{- if $scaling.owner }}
{{- $line := printf "%s-%s: %d, set by %s" (include "context-cache.fullname" $) .component (int $scaling.live) $scaling.owner }}
{{- if and (ge (int $scaling.asked) 0) (ne (int $scaling.asked) (int $scaling.live)) }}{{ $line = printf "%s; the values say %d" $line (int $scaling.asked) }}{{ end }}
{{- $lines = append $lines $line }}
{{- end }}
{{- end }}
{{- $lines | toJson }}
{{- end }}
