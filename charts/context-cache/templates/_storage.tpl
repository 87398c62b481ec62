{{/*
What Kubernetes cannot change about the volumes of a release, refused before anything changes: an upgrade would fail when
other objects have been upgraded already.
*/}}

{{/*
The claim template of a StatefulSet in the cluster, in words, where the values ask for another one; empty: they ask for the
same. Kubernetes stores sizes in its own spelling (1024Gi as 1Ti), so numbers are compared. dict "name" "valkey.storage"
"claim" (the template) "asked" (its size and storageClassName in the values)
*/}}
{{- define "context-cache.otherClaim" -}}
{{- $size := dig "spec" "resources" "requests" "storage" "0" .claim }}
{{- $class := dig "spec" "storageClassName" "" .claim }}
{{- $name := printf "%s.size" .name }}
{{- $is := include "context-cache.bytes" (dict "name" $name "value" $size) }}
{{- $asked := include "context-cache.bytes" (dict "name" $name "value" .asked.size) }}
{{- if or (ne $is $asked) (ne $class .asked.storageClassName) }}
{{- printf "size %s, storageClassName %s" $size ($class | default "\"\"") }}
{{- end }}
{{- end }}

{{/*
Stops where an upgrade would replace the workload of an engine without sidecar.storage.replaces, or change the volumes of its
StatefulSet. dict "root" $ and what context-cache.engines has of the engine.
*/}}
{{- define "context-cache.storage.check" -}}
{{- $storage := .root.Values.sidecar.storage }}
{{- $namespace := .root.Release.Namespace }}
{{- $name := printf "%s-%s" (include "context-cache.fullname" .root) .component }}
{{- $old := include "context-cache.otherKind" . | fromJson }}
{{- $live := lookup "apps/v1" .kind $namespace $name }}
{{- if and $old $live }}
{{- fail (printf "Deployment and StatefulSet %s both exist: a rollback or an upgrade between kinds of sidecar.storage stopped half-way. Delete the unwanted workload (kubectl delete %s %s -n %s keeps the %s) and upgrade again" $name (lower $old.kind) $name $namespace $live.kind) }}
{{- end }}
{{- if and $old (ne $old.kind $storage.replaces) }}
{{- $kv := " and their KV" }}
{{- if eq $old.kind "StatefulSet" }}
{{- $kv = "; their directories stay on the nodes" }}
{{- if dig "spec" "volumeClaimTemplates" list $old }}
{{- $retention := dig "spec" "persistentVolumeClaimRetentionPolicy" "whenDeleted" "Retain" $old }}
{{- $kv = ternary ", their claims and the KV on these (sidecar.storage.whenDeleted is Delete)" "; their claims stay, and no pod uses them" (eq $retention "Delete") }}
{{- end }}
{{- end }}
{{- fail (printf "sidecar.storage.type %s makes the engine a %s: the upgrade would delete %s %s with %d pods%s. No pod of this model answers until new pods have loaded it. To continue, set sidecar.storage.replaces: %s. Otherwise restore sidecar.storage.type" $storage.type .kind $old.kind $name (dig "spec" "replicas" 1 $old | int) $kv $old.kind) }}
{{- end }}
{{- if and $live (eq .kind "StatefulSet") }}
{{- $claim := first (dig "spec" "volumeClaimTemplates" list $live) }}
{{- $is := "" }}
{{- if not $claim }}
{{- if eq $storage.type "pvc" }}{{ $is = "type hostPath" }}{{ end }}
{{- else if eq $storage.type "hostPath" }}
{{- $is = "type pvc" }}
{{- else }}
{{- $is = include "context-cache.otherClaim" (dict "name" "sidecar.storage" "claim" $claim "asked" $storage) }}
{{- end }}
{{- if $is }}
{{- fail (printf "sidecar.storage: Kubernetes cannot change the volumes of StatefulSet %s (%s). Restore these values, or remove the StatefulSet without its pods (kubectl delete statefulset %s -n %s --cascade=orphan) and upgrade with replicas: %d, its current number. Existing claims keep their size until it is changed in each (kubectl patch pvc)" $name $is $name $namespace (dig "spec" "replicas" 1 $live | int)) }}
{{- end }}
{{- end }}
{{- end }}
