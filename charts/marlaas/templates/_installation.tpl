{{/* The operator's configuration file: marlaas_operator.installation.Installation. */}}
{{- define "marlaas.installation" -}}
release: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
natsUrl: {{ include "marlaas.natsUrl" . | quote }}
{{- if .Values.nats.external.url }}
natsPodSelector: null
{{- else }}
natsPodSelector:
  app.kubernetes.io/component: nats
  app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
natsCidrs: {{ toJson .Values.nats.external.cidrs }}
busSecret: {{ include "marlaas.busSecret" . }}
blobs:
  url: {{ include "marlaas.blobsUrl" . | quote }}
  claimName: {{ include "marlaas.blobsClaim" . | default nil | toJson }}
  secretName: {{ .Values.blobs.secretName | default nil | toJson }}
workerImage:
  name: {{ include "marlaas.workerImage" . | quote }}
  pullPolicy: {{ .Values.imagePullPolicy }}
  pullSecrets: {{ toJson .Values.imagePullSecrets }}
{{- with .Values.worker.pythonEnvironment }}
{{- if .claimName }}
pythonEnvironment:
  claimName: {{ .claimName }}
  mountPath: {{ .mountPath | quote }}
  pythonPath: {{ .pythonPath | quote }}
{{- else }}
pythonEnvironment: null
{{- end }}
{{- end }}
modelCache:
  claimName: {{ .Values.worker.modelCache.claimName | default nil | toJson }}
dnsCidrs: {{ toJson .Values.network.dnsCidrs }}
network:
  closedRanges: {{ include "marlaas.closedRanges" . }}
  jobEgress: {{ toJson .Values.network.jobEgress }}
  store: {{ toJson .Values.network.store }}
  hub: {{ toJson .Values.network.hub }}
metricsFrom: {{ toJson .Values.network.metricsFrom }}
sandbox:
  runtimeClassName: {{ .Values.sandbox.runtimeClassName | default nil | toJson }}
  defaultCpu: {{ .Values.sandbox.defaultCpu | quote }}
requireTenant: {{ .Values.requireTenant }}
logLevel: {{ .Values.logLevel }}
{{- end }}
