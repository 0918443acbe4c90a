{{/* Labels that select a component's pods: (list $ "operator"). They never change, so that upgrades work. */}}
{{- define "marlaas.selector" -}}
app.kubernetes.io/name: marlaas
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* All labels of an object: (list $ "operator"). */}}
{{- define "marlaas.labels" -}}
{{ include "marlaas.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- define "marlaas.operatorImage" -}}
{{ .Values.operator.image | default (printf "marlaas/operator:%s" .Chart.AppVersion) }}
{{- end }}

{{- define "marlaas.workerImage" -}}
{{ .Values.worker.image | default (printf "marlaas/worker:%s" .Chart.AppVersion) }}
{{- end }}

{{- define "marlaas.natsUrl" -}}
{{ .Values.nats.external.url | default (printf "nats://%s-nats.%s.svc:4222" .Release.Name .Release.Namespace) }}
{{- end }}

{{/* The Secret with the bus's keys and the platform's credentials. */}}
{{- define "marlaas.busSecret" -}}
{{ .Values.nats.external.credsSecret | default (printf "%s-bus" .Release.Name) }}
{{- end }}

{{- define "marlaas.blobsUrl" -}}
{{ .Values.blobs.url | default "file:///var/lib/marlaas/blobs" }}
{{- end }}

{{/* The claim that holds the blobs; empty if blobs.url is set. */}}
{{- define "marlaas.blobsClaim" -}}
{{- if not .Values.blobs.url }}{{ .Values.blobs.persistentVolumeClaim.existing | default (printf "%s-blobs" .Release.Name) }}{{ end }}
{{- end }}

{{/* A pod's spec up to its containers: (dict "root" $ "of" .Values.operator "account" "…"). */}}
{{- define "marlaas.pod" -}}
serviceAccountName: {{ .account }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .root.Values.priorityClassName | default (ternary (printf "%s-platform" .root.Release.Name) "" .root.Values.priorityClass.create) }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Fields that every container has. */}}
{{- define "marlaas.locked" -}}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Egress to DNS. */}}
{{- define "marlaas.dnsEgress" -}}
- to:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}
    {{- range .Values.network.dnsCidrs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/* Egress to the bus. */}}
{{- define "marlaas.busEgress" -}}
{{- if not .Values.nats.external.url -}}
- to:
    - podSelector: {matchLabels: {app.kubernetes.io/name: marlaas, app.kubernetes.io/instance: {{ .Release.Name }}, app.kubernetes.io/component: nats}}
  ports:
    - {port: 4222, protocol: TCP}
{{- else -}}
- to:
    {{- range .Values.nats.external.cidrs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    - {port: {{ include "marlaas.natsPort" . }}, protocol: TCP}
{{- end }}
{{- end }}

{{- define "marlaas.natsPort" -}}
{{ regexFind ":[0-9]+$" (include "marlaas.natsUrl" .) | trimPrefix ":" | default "4222" }}
{{- end }}

{{/* Ingress for clients that may read a metrics port: (list $ 8080). The kubelet's probes come from the node and are always allowed. */}}
{{- define "marlaas.metricsIngress" -}}
{{- with (index . 0).Values.network.metricsFrom -}}
- from: {{- toYaml . | nindent 4 }}
  ports:
    - {port: {{ index $ 1 }}, protocol: TCP}
{{- end }}
{{- end }}

{{/* CEL: the request comes from the operator, or from the uninstall Job. */}}
{{- define "marlaas.byTheOperator" -}}
request.userInfo.username in ['system:serviceaccount:{{ .Release.Namespace }}:{{ .Release.Name }}-operator', 'system:serviceaccount:{{ .Release.Namespace }}:{{ .Release.Name }}-uninstall']
{{- end }}

{{/* CEL: bytes of an object as text, without its status and managedFields, which the API server keeps. */}}
{{- define "marlaas.wholeBytes" -}}
size(bytes('%s'.format([[{{ . }}.spec, {{ . }}.metadata.?labels.orValue({}), {{ . }}.metadata.?annotations.orValue({}), {{ . }}.metadata.?finalizers.orValue([]), {{ . }}.metadata.?ownerReferences.orValue([])]])))
{{- end }}
