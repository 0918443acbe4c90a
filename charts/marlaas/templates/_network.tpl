{{/* Ranges that `public` does not contain, as JSON: private, loopback and link-local addresses, metadata services of clouds, and the cluster's own. */}}
{{- define "marlaas.closedRanges" -}}
{{- $private := list "10.0.0.0/8" "172.16.0.0/12" "192.168.0.0/16" "100.64.0.0/10" "127.0.0.0/8" "0.0.0.0/8" "::1/128" "::/128" "fc00::/7" -}}
{{- $translated := list "64:ff9b::/96" "64:ff9b:1::/48" "2002::/16" -}}
{{- $metadata := list "169.254.0.0/16" "fe80::/10" "168.63.129.16/32" "192.0.0.192/32" -}}
{{- concat $private $translated $metadata .Values.network.clusterCidrs .Values.network.apiServerCidrs | uniq | toJson -}}
{{- end }}

{{/* Peers of a NetworkPolicy that are address ranges: (list $ ranges). */}}
{{- define "marlaas.ranges" -}}
{{- $closed := include "marlaas.closedRanges" (index . 0) | fromJsonArray -}}
{{- $peers := list -}}
{{- range index . 1 -}}
{{- if eq . "public" -}}
{{- $four := list -}}
{{- $six := list -}}
{{- range $closed -}}
{{- if contains ":" . -}}
{{- $six = append $six . -}}
{{- else -}}
{{- $four = append $four . -}}
{{- end -}}
{{- end -}}
{{- $peers = append $peers (dict "ipBlock" (dict "cidr" "0.0.0.0/0" "except" $four)) -}}
{{- $peers = append $peers (dict "ipBlock" (dict "cidr" "::/0" "except" $six)) -}}
{{- else -}}
{{- $peers = append $peers (dict "ipBlock" (dict "cidr" .)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $peers -}}
{{- end }}

{{/* A list of texts in CEL. */}}
{{- define "marlaas.celList" -}}
[{{ range $at, $text := . }}{{ if $at }}, {{ end }}'{{ $text }}'{{ end }}]
{{- end }}
