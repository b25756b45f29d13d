{{/* The pod of both topologies: the value of `template:`. */}}
{{- define "ssmd.pod" -}}
{{- $local := eq .Values.topology "node-local" -}}
metadata:
  labels:
    {{- include "ssmd.labels" . | nindent 4 }}
    ssmd/topology: {{ .Values.topology }}
  annotations:
    checksum/config: {{ print (include "ssmd.conf" .) (toJson .Values.models) (.Files.Glob "files/models/*.txtpb").AsConfig | sha256sum }}
spec:
  serviceAccountName: {{ .Release.Name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .Values.priorityClassName | default (ternary "system-node-critical" "" $local) }}
  priorityClassName: {{ . }}
  {{- end }}
  # preStop, the drain, and 20 s to stop.
  terminationGracePeriodSeconds: {{ add .Values.drainSeconds 20 (ternary 0 5 $local) }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if not $local }}
  topologySpreadConstraints:
    {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "ssmd.selector" $ | nindent 10 }}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    {{- if not $local }}
    fsGroup: 65532  # the secrets
    {{- end }}
    seccompProfile:
      type: RuntimeDefault
  {{- if $local }}
  initContainers:
    # A folder that kubelet makes on the node is root's alone. Group 65532 may enter: this server, and workers whose pods
    # have supplementalGroups: [65532]. The only thing here that runs as root; it may change owners and nothing else.
    - name: socket-folder
      image: {{ include "ssmd.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [sh, -c, "chgrp 65532 /run/ssmd && chmod 0770 /run/ssmd"]
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 16Mi}
      securityContext:
        runAsNonRoot: false
        runAsUser: 0
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [CHOWN]}
      volumeMounts:
        - {name: sockets, mountPath: /run/ssmd}
  {{- end }}
  containers:
    - name: ssmd
      image: {{ include "ssmd.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [--config, /etc/ssmd/ssmd.conf]
      ports:
        {{- if not $local }}
        - {name: grpc, containerPort: 50051}
        {{- end }}
        - {name: metrics, containerPort: 9464}
      resources:
        requests:
          cpu: {{ .Values.resources.cpu | quote }}
          memory: {{ .Values.resources.memory }}
        limits:
          memory: {{ .Values.resources.memory }}
          {{- if gt (int .Values.gpu.count) 0 }}
          {{ .Values.gpu.resource }}: {{ .Values.gpu.count }}
          {{- end }}
      {{- if not $local }}
      lifecycle:
        # Time for DNS to forget this pod; then SIGTERM, on which the server drains.
        preStop:
          sleep: {seconds: 5}
      {{- end }}
      startupProbe:
        httpGet: {path: /startupz, port: metrics}
        periodSeconds: 2
        failureThreshold: 150
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 5
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /healthz, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        {{- if $local }}
        - {name: sockets, mountPath: /run/ssmd}
        {{- end }}
        - {name: config, mountPath: /etc/ssmd/ssmd.conf, subPath: ssmd.conf, readOnly: true}
        - {name: models, mountPath: /etc/ssmd/models, readOnly: true}
        {{- if not $local }}
        - {name: tls, mountPath: /etc/ssmd/tls, readOnly: true}
        - {name: tokens, mountPath: /etc/ssmd/tokens, readOnly: true}
        {{- end }}
        - {name: tmp, mountPath: /tmp}
  volumes:
    {{- if $local }}
    - name: sockets
      hostPath: {path: {{ .Values.socketFolder | quote }}, type: DirectoryOrCreate}
    {{- end }}
    - name: config
      configMap: {name: {{ .Release.Name }}-config}
    - name: models
      configMap: {name: {{ .Release.Name }}-models}
    {{- if not $local }}
    - name: tls
      secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
    - name: tokens
      secret: {secretName: {{ .Values.tokens.secretName }}, defaultMode: 0440}
    {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: 64Mi}
{{- end }}
