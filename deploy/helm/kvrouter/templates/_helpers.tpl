{{- define "kvrouter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* Derived names add at most 10 characters; label values and Service names are limited to 63. */}}
{{- define "kvrouter.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "kvrouter.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvrouter.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvrouter.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvrouter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvrouter.labels" -}}
{{ include "kvrouter.selectorLabels" . }}
{{- with .Values.image.tag }}
app.kubernetes.io/version: {{ . | trunc 63 | trimSuffix "-" | quote }}
{{- end }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvrouter.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvrouter.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "kvrouter.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag }}
{{- end }}
{{- end }}

{{- define "kvrouter.workersNamespace" -}}
{{- default .Release.Namespace .Values.workers.namespace }}
{{- end }}

{{/* InferencePool of the workers; empty: none. */}}
{{- define "kvrouter.pool" -}}
{{- if .Values.workers.pool }}{{ .Values.workers.pool }}
{{- else if .Values.endpointPicker.enabled }}{{ include "kvrouter.fullname" . }}
{{- end }}
{{- end }}

{{/* Non-empty if the router uses the API server. */}}
{{- define "kvrouter.asksAPI" -}}
{{- if or (eq .Values.workers.discovery "kubernetes") (include "kvrouter.watchesPeers" .) }}true{{ end }}
{{- end }}

{{/* Non-empty if each router has a NATS server, with a port for the others. */}}
{{- define "kvrouter.ownCluster" -}}
{{- if and .Values.cluster.enabled (not .Values.cluster.nats) }}true{{ end }}
{{- end }}

{{/* Non-empty if the routers watch the EndpointSlices of their Service. */}}
{{- define "kvrouter.watchesPeers" -}}
{{- if and (include "kvrouter.ownCluster" .) (eq .Values.cluster.discovery "service") }}true{{ end }}
{{- end }}

{{/* Secret with the keys; empty: none. */}}
{{- define "kvrouter.secret" -}}
{{- with .Values.auth }}
{{- if .existingSecret }}{{ .existingSecret }}
{{- else if or .apiKey .routerApiKey .clusterKey .workerApiKey .apiKeysFile }}{{ include "kvrouter.fullname" $ }}
{{- end }}
{{- end }}
{{- end }}

{{/* Entry of that Secret with the keys file; empty: none. */}}
{{- define "kvrouter.keysFile" -}}
{{- if .Values.auth.apiKeysFile }}keys.yaml{{ else }}{{ .Values.auth.existingSecretKeysFile }}{{ end }}
{{- end }}

{{/* Content of the --config file: the value config, overridden by the chart's settings. */}}
{{- define "kvrouter.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $_ := set $config "host" .Values.listenAddress }}
{{- $_ := set $config "http-port" 8000 }}
{{- $_ := set $config "router-port" 7000 }}
{{- $_ := set $config "drain-delay" (printf "%ds" (int .Values.drain.delaySeconds)) }}
{{- $_ := set $config "drain-timeout" (printf "%ds" (int .Values.drain.timeoutSeconds)) }}
{{- $_ := set $config "index-snapshot" "/var/lib/kvrouter/index" }}
{{- if .Values.router.expose }}
{{- $_ := set $config "router-host" .Values.listenAddress }}
{{- end }}
{{- if .Values.metrics.expose }}
{{- $_ := set $config "metrics-host" .Values.listenAddress }}
{{- $_ := set $config "metrics-port" 9090 }}
{{- end }}
{{- if .Values.auth.insecure }}
{{- $_ := set $config "insecure" true }}
{{- end }}
{{- if include "kvrouter.keysFile" . }}
{{- $_ := set $config "api-keys-file" (printf "/etc/kvrouter-keys/%s" (include "kvrouter.keysFile" .)) }}
{{- end }}
{{- if .Values.tls.secretName }}
{{- $_ := set $config "tls-cert" "/etc/kvrouter-tls/tls.crt" }}
{{- $_ := set $config "tls-key" "/etc/kvrouter-tls/tls.key" }}
{{- if .Values.tls.clientCA }}
{{- $_ := set $config "tls-client-ca" "/etc/kvrouter-tls/ca.crt" }}
{{- end }}
{{- end }}
{{- with .Values.tokenizer.model }}
{{- $_ := set $config "model" . }}
{{- end }}
{{- with .Values.workers }}
{{- if eq .discovery "kubernetes" }}
{{- $_ := set $config "discovery" "kubernetes" }}
{{- $_ := set $config "namespace" (include "kvrouter.workersNamespace" $) }}
{{- $_ := set $config "worker-port" .port }}
{{- with include "kvrouter.pool" $ }}{{ $_ := set $config "pool" . }}{{ end }}
{{- if .selector }}{{ $_ := set $config "selector" .selector }}{{ end }}
{{- if .prefillSelector }}{{ $_ := set $config "prefill-selector" .prefillSelector }}{{ end }}
{{- if .decodeSelector }}{{ $_ := set $config "decode-selector" .decodeSelector }}{{ end }}
{{- else if eq .discovery "dns" }}
{{- $_ := set $config "discovery" .dns }}
{{- else if eq .discovery "static" }}
{{- $_ := set $config "worker" .static }}
{{- end }}
{{- end }}
{{- if include "kvrouter.ownCluster" . }}
{{- $_ := set $config "cluster" (default (include "kvrouter.fullname" .) .Values.cluster.name) }}
{{- $_ := set $config "cluster-port" 6222 }}
{{- if include "kvrouter.watchesPeers" . }}
{{- $_ := set $config "cluster-discovery" (printf "service://%s-peers:6222" (include "kvrouter.fullname" .)) }}
{{- else }}
{{- $_ := set $config "cluster-discovery" (printf "dns://%s-peers.%s.svc:6222" (include "kvrouter.fullname" .) .Release.Namespace) }}
{{- end }}
{{- else if .Values.cluster.enabled }}
{{- $_ := set $config "cluster" (join "," .Values.cluster.nats) }}
{{- /* Releases of the same name in other namespaces may use the same servers. */}}
{{- $name := default (printf "%s.%s" .Release.Namespace (include "kvrouter.fullname" .)) .Values.cluster.name }}
{{- $_ := set $config "cluster-prefix" (printf "kvrouter.%s" $name) }}
{{- end }}
{{- with .Values.endpointPicker }}
{{- if .enabled }}
{{- $_ := set $config "ext-proc-port" 9002 }}
{{- $_ := set $config "ext-proc-health-port" 9003 }}
{{- $_ := set $config "ext-proc-fallbacks" .fallbacks }}
{{- if .tls }}{{ $_ := set $config "ext-proc-tls" true }}{{ end }}
{{- end }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* The kubelet has no client certificate: with clientCA the probe only checks that the port is open. */}}
{{- define "kvrouter.probe" -}}
{{- if .root.Values.tls.clientCA -}}
tcpSocket: {port: http}
{{- else if .root.Values.tls.secretName -}}
httpGet: {path: {{ .path }}, port: http, scheme: HTTPS}
{{- else -}}
httpGet: {path: {{ .path }}, port: http}
{{- end }}
{{ toYaml .probe }}
{{- end }}

{{/* Rejects conflicting or missing values for which the schema's error would not be helpful. */}}
{{- define "kvrouter.check" -}}
{{- $v := .Values }}
{{- if not $v.image.repository }}
{{- fail "image.repository: required: there is no public image; build it with `make dist`, push it to your registry and set its name (docs/kubernetes.md)" }}
{{- end }}
{{- if not (or $v.image.tag $v.image.digest) }}
{{- fail "image.tag: required: the version printed by `docker load`; or set image.digest" }}
{{- end }}
{{- with $v.auth }}
{{- $own := or .apiKey .routerApiKey .clusterKey .workerApiKey .apiKeysFile }}
{{- if and .existingSecret $own }}
{{- fail "auth.existingSecret: excludes the other keys of auth; set only one of them" }}
{{- end }}
{{- if and .existingSecretKeysFile (not .existingSecret) }}
{{- fail "auth.existingSecretKeysFile: requires auth.existingSecret" }}
{{- end }}
{{- $free := or .insecure $v.tls.clientCA .existingSecret }}
{{- if not (or $free .apiKey .apiKeysFile) }}
{{- fail "auth.apiKey: required: without a key anyone in the cluster can use the OpenAI port; set a key (openssl rand -hex 24), auth.apiKeysFile or auth.existingSecret, or auth.insecure to allow it" }}
{{- end }}
{{- if and $v.router.expose (not (or $free .routerApiKey)) }}
{{- fail "auth.routerApiKey: required by router.expose: without a key anyone in the cluster can add workers; set a key, or auth.insecure to allow it" }}
{{- end }}
{{- if and (include "kvrouter.ownCluster" $) (not (or .insecure .existingSecret .clusterKey)) }}
{{- fail "auth.clusterKey: required by cluster.enabled: a key of at least 16 characters that the routers share (openssl rand -hex 32)" }}
{{- end }}
{{- if and .clusterKey (not (include "kvrouter.ownCluster" $)) }}
{{- fail "auth.clusterKey: requires cluster.enabled, and excludes cluster.nats: existing NATS servers have their own credentials" }}
{{- end }}
{{- end }}
{{- if and $v.cluster.nats (not $v.cluster.enabled) }}
{{- fail "cluster.nats: requires cluster.enabled" }}
{{- end }}
{{- if and $v.rbac.create (not $v.serviceAccount.create) (not $v.serviceAccount.name) }}
{{- fail "serviceAccount.name: required: every Pod of the namespace would get the router's rights through the account default; set a name, or rbac.create to false" }}
{{- end }}
{{- if and $v.tls.clientCA (not $v.tls.secretName) }}
{{- fail "tls.clientCA: requires tls.secretName" }}
{{- end }}
{{- with $v.workers }}
{{- $labels := or .selector .prefillSelector .decodeSelector }}
{{- if eq .discovery "kubernetes" }}
{{- if not (or .pool $labels $v.endpointPicker.enabled) }}
{{- fail "workers.selector: required: the labels of the workers' Pods, such as app=vllm; or set workers.pool or another workers.discovery" }}
{{- end }}
{{- if and (or .pool $v.endpointPicker.enabled) $labels }}
{{- fail "workers.pool: the pool selects the workers' Pods; remove the selectors" }}
{{- end }}
{{- else if or .pool $labels .namespace }}
{{- fail (printf "workers: pool, selectors and namespace require discovery kubernetes, not %s" .discovery) }}
{{- end }}
{{- if ne (eq .discovery "dns") (ne .dns "") }}
{{- fail "workers.dns: set it if and only if workers.discovery is dns, for example to dns://vllm.ns:8000" }}
{{- end }}
{{- if ne (eq .discovery "static") (gt (len .static) 0) }}
{{- fail "workers.static: set it if and only if workers.discovery is static, for example to url=http://gpu-1:8100" }}
{{- end }}
{{- if and $v.networkPolicy.enabled (ne .discovery "kubernetes") (not $v.networkPolicy.extraEgress) }}
{{- fail (printf "networkPolicy.extraEgress: with workers.discovery %s the chart does not know the addresses of the workers; add them here" .discovery) }}
{{- end }}
{{- end }}
{{- with $v.endpointPicker }}
{{- if and .enabled (ne $v.workers.discovery "kubernetes") }}
{{- fail (printf "endpointPicker.enabled: requires workers.discovery kubernetes, not %s: the workers are those of an InferencePool" $v.workers.discovery) }}
{{- end }}
{{- if and .enabled (ne (include "kvrouter.workersNamespace" $) $.Release.Namespace) }}
{{- fail "workers.namespace: an InferencePool refers to pickers of its own namespace only; with endpointPicker, install the release in the workers' namespace" }}
{{- end }}
{{- if and .enabled (not $v.workers.pool) (not .matchLabels) }}
{{- fail "endpointPicker.matchLabels: required: the labels of the workers' Pods, such as {app: vllm}; or set workers.pool to an existing pool" }}
{{- end }}
{{- if and $v.workers.pool .matchLabels }}
{{- fail "endpointPicker.matchLabels: the pool of workers.pool has its own labels; set only one of them" }}
{{- end }}
{{- if and .httpRoute.enabled (not (and .enabled .httpRoute.gateway)) }}
{{- fail "endpointPicker.httpRoute: requires endpointPicker.enabled, and the name of your Gateway in endpointPicker.httpRoute.gateway" }}
{{- end }}
{{- end }}
{{- with $v.tokenizer }}
{{- if and .model (not (or .volume .fetch.enabled)) }}
{{- fail "tokenizer.model: its files are missing; set tokenizer.volume to a volume with them, or tokenizer.fetch" }}
{{- end }}
{{- if and .fetch.enabled (not (and .fetch.image .model)) }}
{{- fail "tokenizer.fetch: requires tokenizer.model, and in tokenizer.fetch.image an image with Python and huggingface_hub" }}
{{- end }}
{{- end }}
{{- end }}
