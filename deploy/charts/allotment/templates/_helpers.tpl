{{- /*
SPDX-License-Identifier: Apache-2.0

The objects are those of deploy/manifests, which is in this chart as the folder manifests (a link).
A template reads one of its files, changes what values change, and writes each object. So every
object is described once: docs/designs/chart.md. The newline at an object's end is part of its last
text.
*/ -}}

{{- /* The name of an image, of a dict of root and image. */ -}}
{{- define "allotment.image" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry -}}
{{- with $registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .image.repository }}:{{ .image.tag | default .tag }}
{{- end -}}

{{- /* Changes a pod's spec, of a dict of root, spec and values, which are those of its part. */ -}}
{{- define "allotment.pod" -}}
{{- $root := .root -}}
{{- $spec := .spec -}}
{{- $values := .values -}}
{{- with $root.Values.imagePullSecrets -}}
{{- $secrets := list -}}
{{- range . }}{{ $secrets = append $secrets (dict "name" .) }}{{ end -}}
{{- $_ := set $spec "imagePullSecrets" $secrets -}}
{{- end -}}
{{- range $key := list "nodeSelector" "tolerations" "priorityClassName" "runtimeClassName" -}}
{{- $_ := unset $spec $key -}}
{{- with get $values $key }}{{ $_ := set $spec $key . }}{{ end -}}
{{- end -}}
{{- range $spec.containers -}}
{{- if hasPrefix "allotment:" .image -}}
{{- $image := dict "root" $root "image" $root.Values.image "tag" $root.Chart.AppVersion -}}
{{- $_ := set . "image" (include "allotment.image" $image) -}}
{{- $_ := set . "imagePullPolicy" $root.Values.image.pullPolicy -}}
{{- end -}}
{{- end -}}
{{- /* Others are beside the first one, as the front, and need the same in every cluster. */ -}}
{{- $_ := set (first $spec.containers) "resources" ($values.resources | default dict) -}}
{{- end -}}

{{- /* All objects of a file as it is, of a list of root and the file's name. */ -}}
{{- define "allotment.file" -}}
{{- range splitList "\n---\n" ((index . 0).Files.Get (index . 1)) }}
---
{{ fromYaml (print . "\n") | toYaml }}
{{- end }}
{{- end -}}
