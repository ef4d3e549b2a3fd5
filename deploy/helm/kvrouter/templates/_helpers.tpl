{{- define "kvrouter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* The longest name made of it has 10 more characters; a label's value and a Service's name have 63. */}}
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

{{/* The InferencePool of the workers; empty: none. */}}
{{- define "kvrouter.pool" -}}
{{- if .Values.workers.pool }}{{ .Values.workers.pool }}
{{- else if .Values.endpointPicker.enabled }}{{ include "kvrouter.fullname" . }}
{{- end }}
{{- end }}

{{/* Whether the router asks the API server for something; empty: it does not. */}}
{{- define "kvrouter.asksAPI" -}}
{{- if or (eq .Values.workers.discovery "kubernetes") (and .Values.replicaSync.enabled (eq .Values.replicaSync.discovery "service")) }}true{{ end }}
{{- end }}

{{/* The Secret with the keys; empty: there is none. */}}
{{- define "kvrouter.secret" -}}
{{- with .Values.auth }}
{{- if .existingSecret }}{{ .existingSecret }}
{{- else if or .apiKey .routerApiKey .replicaKey .workerApiKey .apiKeysFile }}{{ include "kvrouter.fullname" $ }}
{{- end }}
{{- end }}
{{- end }}

{{/* The key of that Secret that holds the file of keys; empty: none does. */}}
{{- define "kvrouter.keysFile" -}}
{{- if .Values.auth.apiKeysFile }}keys.yaml{{ else }}{{ .Values.auth.existingSecretKeysFile }}{{ end }}
{{- end }}

{{/* What stands in the file of --config: the chart's settings, then those of the values. */}}
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
{{- if .Values.replicaSync.enabled }}
{{- $_ := set $config "replica-sync" true }}
{{- $_ := set $config "replica-sync-port" 7100 }}
{{- if eq .Values.replicaSync.discovery "service" }}
{{- $_ := set $config "replica-discovery" (printf "service://%s-peers:7100" (include "kvrouter.fullname" .)) }}
{{- else }}
{{- $_ := set $config "replica-discovery" (printf "dns://%s-peers.%s.svc:7100" (include "kvrouter.fullname" .) .Release.Namespace) }}
{{- end }}
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

{{/* Kubelet has no certificate of a client: then it only looks whether the port is open. */}}
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

{{/* Values that do not go together, which no schema can tell in words that help. */}}
{{- define "kvrouter.check" -}}
{{- $v := .Values }}
{{- if not $v.image.repository }}
{{- fail "image.repository: no registry has the router's image: build it by `make dist`, push it to one of yours and give its name there (docs/kubernetes.md)" }}
{{- end }}
{{- if not (or $v.image.tag $v.image.digest) }}
{{- fail "image.tag: give the version that `docker load` has told, or image.digest" }}
{{- end }}
{{- with $v.auth }}
{{- $own := or .apiKey .routerApiKey .replicaKey .workerApiKey .apiKeysFile }}
{{- if and .existingSecret $own }}
{{- fail "auth.existingSecret: it is there in place of the other keys of auth; give either" }}
{{- end }}
{{- if and .existingSecretKeysFile (not .existingSecret) }}
{{- fail "auth.existingSecretKeysFile: it is a key of auth.existingSecret; give that too" }}
{{- end }}
{{- $free := or .insecure $v.tls.clientCA .existingSecret }}
{{- if not (or $free .apiKey .apiKeysFile) }}
{{- fail "auth.apiKey: everybody in the cluster could use the OpenAI port without a key; give one (openssl rand -hex 24), auth.apiKeysFile, auth.existingSecret, or auth.insecure if that is meant" }}
{{- end }}
{{- if and $v.router.expose (not (or $free .routerApiKey)) }}
{{- fail "auth.routerApiKey: router.expose would let everybody in the cluster add workers; give a key, or auth.insecure if that is meant" }}
{{- end }}
{{- if and $v.replicaSync.enabled (not (or .insecure .existingSecret .replicaKey)) }}
{{- fail "auth.replicaKey: replicaSync needs the key that the routers share, 16 characters at least" }}
{{- end }}
{{- end }}
{{- if and $v.rbac.create (not $v.serviceAccount.create) (not $v.serviceAccount.name) }}
{{- fail "serviceAccount.name: every Pod of the namespace would get the router's rights by the account default; name one, or set rbac.create to false" }}
{{- end }}
{{- if and $v.tls.clientCA (not $v.tls.secretName) }}
{{- fail "tls.clientCA: give tls.secretName, too" }}
{{- end }}
{{- with $v.workers }}
{{- $labels := or .selector .prefillSelector .decodeSelector }}
{{- if eq .discovery "kubernetes" }}
{{- if not (or .pool $labels $v.endpointPicker.enabled) }}
{{- fail "workers.selector: name the Pods of the workers by their labels, such as app=vllm, or give workers.pool or another workers.discovery" }}
{{- end }}
{{- if and (or .pool $v.endpointPicker.enabled) $labels }}
{{- fail "workers.pool: the pool names the workers' Pods already; leave out the selectors" }}
{{- end }}
{{- else if or .pool $labels .namespace }}
{{- fail (printf "workers: pool, selectors and namespace are for discovery kubernetes, and it is %s" .discovery) }}
{{- end }}
{{- if ne (eq .discovery "dns") (ne .dns "") }}
{{- fail "workers.dns: it goes with workers.discovery dns, such as dns://vllm.ns:8000" }}
{{- end }}
{{- if ne (eq .discovery "static") (gt (len .static) 0) }}
{{- fail "workers.static: it goes with workers.discovery static, such as url=http://gpu-1:8100" }}
{{- end }}
{{- if and $v.networkPolicy.enabled (ne .discovery "kubernetes") (not $v.networkPolicy.extraEgress) }}
{{- fail (printf "networkPolicy.extraEgress: with workers.discovery %s the chart cannot know where the workers are; say it there" .discovery) }}
{{- end }}
{{- end }}
{{- with $v.endpointPicker }}
{{- if and .enabled (ne $v.workers.discovery "kubernetes") }}
{{- fail (printf "endpointPicker.enabled: its workers are those of an InferencePool, which is for workers.discovery kubernetes, and it is %s" $v.workers.discovery) }}
{{- end }}
{{- if and .enabled (ne (include "kvrouter.workersNamespace" $) $.Release.Namespace) }}
{{- fail "workers.namespace: an InferencePool names a picker of its own namespace only; with endpointPicker install the release where the workers are" }}
{{- end }}
{{- if and .enabled (not $v.workers.pool) (not .matchLabels) }}
{{- fail "endpointPicker.matchLabels: name the Pods of the workers by their labels, such as {app: vllm}, or a pool that is there by workers.pool" }}
{{- end }}
{{- if and $v.workers.pool .matchLabels }}
{{- fail "endpointPicker.matchLabels: the pool that workers.pool names has labels of its own; give either" }}
{{- end }}
{{- if and .httpRoute.enabled (not (and .enabled .httpRoute.gateway)) }}
{{- fail "endpointPicker.httpRoute: give endpointPicker.enabled, and the name of your Gateway in endpointPicker.httpRoute.gateway" }}
{{- end }}
{{- end }}
{{- with $v.tokenizer }}
{{- if and .model (not (or .volume .fetch.enabled)) }}
{{- fail "tokenizer.model: nothing would bring its files; give tokenizer.volume that has them, or tokenizer.fetch" }}
{{- end }}
{{- if and .fetch.enabled (not (and .fetch.image .model)) }}
{{- fail "tokenizer.fetch: give tokenizer.model, and tokenizer.fetch.image, which has Python and huggingface_hub" }}
{{- end }}
{{- end }}
{{- end }}
