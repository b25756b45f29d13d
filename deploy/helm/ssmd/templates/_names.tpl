{{- define "ssmd.selector" -}}
app.kubernetes.io/name: ssmd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ssmd.labels" -}}
{{ include "ssmd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "ssmd.metadata" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "ssmd.labels" . | nindent 2 }}
{{- end }}

{{- define "ssmd.image" -}}
{{- $backend := ternary "cuda" "cpu" (gt (int .Values.gpu.count) 0) -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $backend) }}
{{- end }}

{{/* ssmd.conf: what follows from the topology, then .Values.config. */}}
{{- define "ssmd.conf" -}}
{{- if eq .Values.topology "node-local" -}}
listen = unix:/run/ssmd/ssmd.sock
{{- else -}}
listen = 0.0.0.0:50051
tls-cert = /etc/ssmd/tls/tls.crt
tls-key = /etc/ssmd/tls/tls.key
{{- if .Values.tls.clientCa }}
tls-client-ca = /etc/ssmd/tls/ca.crt
{{- end }}
tokens = /etc/ssmd/tokens/tokens
{{- end }}
metrics-listen = 0.0.0.0:9464
backend = {{ ternary "cuda" "cpu" (gt (int .Values.gpu.count) 0) }}
drain-timeout-ms = {{ mul .Values.drainSeconds 1000 }}
{{- range $key, $value := .Values.config }}
{{- range (kindIs "slice" $value | ternary $value (list $value)) }}
{{ $key }} = {{ . | toString }}
{{- end }}
{{- end }}
{{ end }}
