package kubernetes

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	goyaml "github.com/goccy/go-yaml"
	"github.com/tidwall/gjson"
	"k8s.io/apimachinery/pkg/util/yaml"

	"kvrouter/internal/base/web"
	"kvrouter/internal/fleet/discovery"
	"kvrouter/internal/testkit/kubernetes"
	"kvrouter/test/deploy"
)

// Where the chart is, and values for all that it has.
const (
	chartFolder = "deploy/helm/kvrouter"
	chartAll    = "testdata/chart/everything.yaml"
)

// chartMust are the values that every installation gives.
var chartMust = []string{"--set=image.repository=registry.example.com/kvrouter", "--set=image.tag=v0.0.0-20261101000000-0123456789ab"}

// chartKey is a client's key.
const chartKey = "--set=auth.apiKey=a-key-of-clients"

// chartSets are the values that the chart is held against, by name.
var chartSets = map[string][]string{
	"the least":       {chartKey, "--set=workers.selector=app=vllm"},
	"labels":          {chartKey, "--values=" + chartFolder + "/examples/labels.yaml"},
	"pool":            {chartKey, "--values=" + chartFolder + "/examples/pool.yaml"},
	"prefill-decode":  {chartKey, "--values=" + chartFolder + "/examples/prefill-decode.yaml"},
	"static":          {chartKey, "--values=" + chartFolder + "/examples/static.yaml"},
	"dns":             {chartKey, "--set=workers.discovery=dns", "--set=workers.dns=dns://vllm.gpus:8000"},
	"a try":           {"--set=auth.insecure=true", "--set=workers.discovery=none", "--set=extraArgs={--engine=mocker,--demo}", "--set=replicas=1"},
	"secret":          {"--set=auth.existingSecret=keys", "--set=auth.existingSecretKeysFile=keys.yaml", "--set=workers.pool=p", "--set=serviceAccount.create=false", "--set=rbac.create=false", "--set=podDisruptionBudget.enabled=false"},
	"certificates":    {"--set=tls.secretName=tls", "--set=tls.clientCA=true", "--set=router.expose=true", "--set=workers.selector=app=vllm", "--set=networkPolicy.enabled=true"},
	"endpoint-picker": {chartKey, "--set=auth.clusterKey=a-key-of-the-routers", "--values=" + chartFolder + "/examples/endpoint-picker.yaml", "--set=networkPolicy.enabled=true"},
	"pool's picker":   {chartKey, "--set=workers.pool=vllm-pool", "--set=endpointPicker.enabled=true", "--set=endpointPicker.tls=false", "--set=endpointPicker.fallbacks=0"},
	"three routers": {
		"--set=auth.insecure=true", "--set=workers.discovery=dns", "--set=workers.dns=dns://vllm.gpus:8000", "--set=replicas=3",
		"--set=cluster.enabled=true", "--set=networkPolicy.enabled=true", "--set=networkPolicy.extraEgress[0].ports[0].port=8000",
	},
	"existing NATS": {
		chartKey, "--set=workers.selector=app=vllm", "--set=networkPolicy.enabled=true", "--set=cluster.enabled=true",
		"--set=cluster.discovery=service", "--set=cluster.nats={nats://nats-0.nats,nats://nats-1.nats:4222,tls://nats.example.com:443}",
	},
	"everything": {"--values=" + chartAll},
}

// helm runs helm, which scripts/helm.sh builds once. Without the programs of Kubernetes
// the test is skipped: who wants those wants it, too.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	if os.Getenv(kubernetes.Folder) == "" {
		t.Skip("make test-kubernetes runs it")
	}
	path, err := exec.CommandContext(t.Context(), "scripts/helm.sh").Output()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(t.Context(), strings.TrimSpace(string(path)), args...)
	home := t.TempDir()
	command.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	out, err := command.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		err = fmt.Errorf("%w: %s", err, failed.Stderr)
	}
	return string(out), err
}

// template returns the objects that the chart makes of values.
func template(t *testing.T, chart string, values ...string) string {
	t.Helper()
	out, err := helm(t, append(append([]string{"template", "kvrouter", chart, "--namespace=inference", "--kube-version=1.36.3"}, chartMust...), values...)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// chartObjects are the objects of a stream, read as Kubernetes reads them.
type chartObjects []gjson.Result

func readObjects(t *testing.T, stream string) (all chartObjects) {
	t.Helper()
	for decoder := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(stream))); ; {
		text, err := decoder.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err == nil {
			text, err = yaml.ToJSON(text)
		}
		if err != nil {
			t.Fatal(err)
		}
		if object := gjson.ParseBytes(text); object.IsObject() {
			all = append(all, object)
		}
	}
}

// of are the objects of these kinds.
func (all chartObjects) of(kinds ...string) (some chartObjects) {
	for _, object := range all {
		if slices.Contains(kinds, object.Get("kind").Str) {
			some = append(some, object)
		}
	}
	return some
}

// matches reports whether labels have all that a selector asks for.
func matches(selector, labels gjson.Result) bool {
	all := len(selector.Map()) > 0
	for key, value := range selector.Map() {
		all = all && labels.Map()[key].Str == value.Str
	}
	return all
}

// eachChartSet calls test with the objects of each set of values.
func eachChartSet(t *testing.T, test func(t *testing.T, stream string, objects chartObjects)) {
	for name, values := range chartSets {
		t.Run(name, func(t *testing.T) {
			stream := template(t, chartFolder, values...)
			test(t, stream, readObjects(t, stream))
		})
	}
}

func TestKubernetesChartIsLinted(t *testing.T) {
	for name, values := range chartSets {
		t.Run(name, func(t *testing.T) {
			out, err := helm(t, append(append([]string{"lint", "--strict", "--namespace=inference", "--kube-version=1.36.3", chartFolder}, chartMust...), values...)...)
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			// It renders NOTES.txt, which template does not, and asks no cluster.
			out, err = helm(t, append(append([]string{"install", "kvrouter", chartFolder, "--namespace=inference", "--dry-run=client"}, chartMust...), values...)...)
			if _, notes, found := strings.Cut(out, "NOTES:"); err != nil || !found || strings.Contains(notes, "<no value>") || !strings.Contains(notes, "rollout status") {
				t.Errorf("%v\n%s", err, notes)
			}
		})
	}
}

// TestKubernetesChartStartsARouter gives what the container gets to the router's own
// reading of settings, and looks whether the objects fit each other.
func TestKubernetesChartStartsARouter(t *testing.T) {
	eachChartSet(t, func(t *testing.T, stream string, objects chartObjects) {
		loads := objects.of("Deployment")
		if len(loads) != 1 {
			t.Fatalf("%d workloads", len(loads))
		}
		pod := loads[0].Get("spec.template")
		container := pod.Get(`spec.containers.#(name=="kvrouter")`)
		cfg := chartConfig(t, objects, container)

		if grace := time.Duration(pod.Get("spec.terminationGracePeriodSeconds").Int()) * time.Second; grace <= cfg.Drain() {
			t.Errorf("terminationGracePeriodSeconds %v: a drain may take %v", grace, cfg.Drain())
		}
		if pod.Get("spec.enableServiceLinks").Raw != "false" {
			t.Error("a Service kvrouter-router would set --router-port")
		}
		peers := cfg.Value("cluster-discovery")
		if mounted := pod.Get("spec.automountServiceAccountToken").Bool(); mounted != (cfg.Value("discovery") == "kubernetes" || strings.HasPrefix(peers, "service://")) {
			t.Errorf("a token %t for discovery %q and peers %q", mounted, cfg.Value("discovery"), peers)
		}
		if web.Loopback(cfg.Value("host")) || web.Loopback(cfg.Value("router-host")) == container.Get(`ports.#(name=="router")`).Exists() {
			t.Errorf("it listens on %s and %s", cfg.Value("host"), cfg.Value("router-host"))
		}
		ports := map[string]int{"http": cfg.Int("http-port"), "router": cfg.Int("router-port"), "cluster": cfg.Int("cluster-port"), "grpc-ext-proc": cfg.Int("ext-proc-port"), "grpc-health": cfg.Int("ext-proc-health-port"),
			"metrics": cfg.Int("metrics-port")}
		container.Get("ports").ForEach(func(_, port gjson.Result) bool {
			if int(port.Get("containerPort").Int()) != ports[port.Get("name").Str] {
				t.Errorf("port %s: the router has %d", port, ports[port.Get("name").Str])
			}
			return true
		})

		labels := pod.Get("metadata.labels")
		if !matches(loads[0].Get("spec.selector.matchLabels"), labels) {
			t.Error("the workload does not select its Pods")
		}
		services := objects.of("Service")
		for _, service := range services {
			if !matches(service.Get("spec.selector"), labels) {
				t.Errorf("%s does not select the Pods", service.Get("metadata.name"))
			}
			for _, port := range service.Get("spec.ports").Array() {
				if !container.Get(fmt.Sprintf("ports.#(name==%q)", port.Get("targetPort").Str)).Exists() {
					t.Errorf("there is no port %s", port)
				}
			}
		}
		for _, object := range objects.of("PodDisruptionBudget") {
			if !matches(object.Get("spec.selector.matchLabels"), labels) {
				t.Error("the budget is for other Pods")
			}
		}
		for _, object := range objects.of("NetworkPolicy") {
			if !matches(object.Get("spec.podSelector.matchLabels"), labels) {
				t.Error("the network policy is for other Pods")
			}
		}
		for _, monitor := range objects.of("ServiceMonitor") {
			seen := 0
			for _, service := range services {
				if matches(monitor.Get("spec.selector.matchLabels"), service.Get("metadata.labels")) {
					seen++
				}
			}
			if seen != 1 {
				t.Errorf("the monitor sees %d Services: each router is to be scraped once", seen)
			}
		}
		for _, rule := range objects.of("PrometheusRule") {
			if n := len(rule.Get("spec.groups.0.rules").Array()); n != len(deploy.ReadAlerts(t)) || !strings.HasPrefix(rule.Get("spec.groups.0.rules.0.annotations.runbook_url").Str, "https://git.example.com/kvrouter/docs/runbook.md#") {
				t.Errorf("%d alerts: %s", n, rule.Get("spec.groups.0.rules.0"))
			}
		}
		for _, board := range objects.of("ConfigMap") {
			if text := board.Get(`data.kvrouter\.json`).Str; text != "" && strings.TrimSpace(text) != strings.TrimSpace(deploy.Read(t, "grafana/kvrouter.json")) {
				t.Error("the board is another one")
			}
		}
		chartCluster(t, objects, container, cfg)
		chartPicker(t, objects, cfg, cfg.Int("ext-proc-port"))
		for object := range strings.SplitSeq(stream, "\n---\n") {
			if strings.Contains(object, "a-key-of-") && !strings.Contains(object, "\nkind: Secret\n") {
				t.Errorf("a key stands in\n%s", object)
			}
		}
	})
}

// chartSettings are the settings in the file that the container reads.
func chartSettings(t *testing.T, objects chartObjects) (settings map[string]any) {
	t.Helper()
	for _, object := range objects.of("ConfigMap") {
		if text := object.Get(`data.kvrouter\.yaml`); text.Exists() {
			if err := goyaml.Unmarshal([]byte(text.Str), &settings); err != nil {
				t.Fatal(err)
			}
		}
	}
	return settings
}

// chartCluster looks whether the routers reach each other, or the existing servers of NATS,
// and nobody else reaches them.
func chartCluster(t *testing.T, objects chartObjects, container gjson.Result, cfg *deploy.Settings) {
	t.Helper()
	where, name, port := cfg.Value("cluster-discovery"), cfg.Value("cluster"), cfg.Int("cluster-port")
	own := name != "" && !strings.Contains(name, "://")
	if own != (where != "") || own != container.Get(`ports.#(name=="cluster")`).Exists() || len(cfg.Values("cluster-peers")) > 0 {
		t.Errorf("cluster %q finds its members by %q and %q, ports %s", name, where, cfg.Values("cluster-peers"), container.Get("ports"))
	}
	if own {
		chartPeers(t, objects, where, port)
	} else if strings.Contains(fmt.Sprint(objects), "-peers") {
		t.Error("a Service or a Role for members that it does not look for")
	}
	if existing := name != "" && !own; existing != (cfg.Value("cluster-prefix") == "kvrouter.inference.kvrouter") {
		t.Errorf("cluster %q, subjects %s", name, cfg.Value("cluster-prefix"))
	}
	for _, policy := range objects.of("NetworkPolicy") {
		for direction, peers := range map[string]string{"ingress": "from", "egress": "to"} {
			found := false
			for _, rule := range policy.Get("spec." + direction).Array() {
				if rule.Get("ports.0.port").Int() != int64(port) {
					continue
				}
				found = true
				selector := rule.Get(peers + ".0.podSelector.matchLabels")
				if len(rule.Get(peers).Array()) != 1 || selector.Raw != policy.Get("spec.podSelector.matchLabels").Raw {
					t.Errorf("%s of the cluster is not that of the routers: %s", direction, rule)
				}
			}
			if found != own {
				t.Errorf("%s at port %d: %t", direction, port, found)
			}
		}
		egress := fmt.Sprint(policy.Get("spec.egress.#.ports.#.port"))
		if existing := name != "" && !own; existing != strings.Contains(egress, "[4222,443]") {
			t.Errorf("cluster %q, egress %s", name, egress)
		}
	}
}

// chartPeers looks whether that leads to the routers, and whether they may ask for it.
func chartPeers(t *testing.T, objects chartObjects, where string, port int) {
	t.Helper()
	if _, err := discovery.ParsePeers(where); err != nil {
		t.Error(err)
	}
	found := false
	for _, service := range objects.of("Service") {
		name := service.Get("metadata.name").Str
		if service.Get("spec.clusterIP").Str != "None" || int(service.Get("spec.ports.0.port").Int()) != port {
			continue
		}
		found = found || slices.Contains([]string{fmt.Sprintf("dns://%s.inference.svc:%d", name, port), fmt.Sprintf("service://%s:%d", name, port)}, where)
		if !service.Get("spec.publishNotReadyAddresses").Bool() {
			t.Error("routers hear each other once they are ready only")
		}
	}
	if !found {
		t.Errorf("%s leads to no headless Service", where)
	}
	may := false
	for _, role := range objects.of("Role") {
		may = may || role.Get("metadata.namespace").Str == "inference" && role.Get("rules.0.resources.0").Str == "endpointslices"
	}
	if may != strings.HasPrefix(where, "service://") {
		t.Errorf("%s, and it may list EndpointSlices: %t", where, may)
	}
}

// chartPicker looks whether the pool, the route and the Service of the picker lead to
// each other and to the router.
func chartPicker(t *testing.T, objects chartObjects, cfg *deploy.Settings, port int) {
	t.Helper()
	pools, routes := objects.of("InferencePool"), objects.of("HTTPRoute")
	var service gjson.Result
	for _, each := range objects.of("Service") {
		if each.Get("spec.ports.0.name").Str == "grpc-ext-proc" {
			service = each
		}
	}
	if service.Exists() != (port != 0) || port == 0 && len(pools)+len(routes) > 0 {
		t.Errorf("port %d of the picker, %d pools, %d routes, Service %s", port, len(pools), len(routes), service.Get("metadata.name"))
	}
	if port != 0 && cfg.Value("pool") == "" {
		t.Error("its workers are not those of a pool")
	}
	for _, pool := range pools {
		at := pool.Get("spec.endpointPickerRef")
		if at.Get("name").Str != service.Get("metadata.name").Str || at.Get("port.number").Int() != service.Get("spec.ports.0.port").Int() || pool.Get("metadata.name").Str != cfg.Value("pool") {
			t.Errorf("the pool is %s, its picker %s", pool.Get("metadata.name"), at)
		}
		if pool.Get("metadata.namespace").Str != cfg.Value("namespace") || len(pool.Get("spec.selector.matchLabels").Map()) == 0 || len(pool.Get("spec.targetPorts").Array()) == 0 {
			t.Errorf("no Pod is in it: %s", pool.Get("spec"))
		}
	}
	for _, route := range routes {
		if to := route.Get("spec.rules.0.backendRefs.0"); to.Get("kind").Str != "InferencePool" || to.Get("name").Str != cfg.Value("pool") {
			t.Errorf("the route leads to %s", to)
		}
	}
}

// chartConfig reads the settings that the container starts with. It looks whether each
// file that they name lies on a volume.
func chartConfig(t *testing.T, objects chartObjects, container gjson.Result) *deploy.Settings {
	t.Helper()
	t.Setenv("KVROUTER_ENGINE", "none") // as in the image
	for _, secret := range objects.of("Secret") {
		for name, value := range secret.Get("stringData").Map() {
			if !strings.Contains(name, ".") {
				t.Setenv(name, value.Str)
			}
		}
	}
	if slices.ContainsFunc(container.Get("envFrom.#.secretRef.name").Array(), func(name gjson.Result) bool { return name.Str == "keys" }) {
		t.Setenv("KVROUTER_API_KEY", "a-key") // of a Secret that is there already
	}
	const state = "/var/lib/kvrouter"
	dir := t.TempDir() // in place of the volume for what the router keeps
	file := filepath.Join(dir, "kvrouter.yaml")
	for _, object := range objects.of("ConfigMap") {
		if text := object.Get(`data.kvrouter\.yaml`); text.Exists() {
			if err := os.WriteFile(file, []byte(strings.ReplaceAll(text.Str, state, dir)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	var args []string
	for _, arg := range container.Get("args").Array() {
		args = append(args, strings.Replace(arg.Str, "/etc/kvrouter/kvrouter.yaml", file, 1))
	}
	cfg := deploy.Accept(t, args...)
	if cfg.Value("config") != file {
		t.Fatal(args)
	}
	for _, path := range []string{cfg.Value("api-keys-file"), cfg.Value("tls-cert"), cfg.Value("tls-key"), cfg.Value("tls-client-ca"), strings.Replace(cfg.Value("index-snapshot"), dir, state, 1), "/etc/kvrouter/kvrouter.yaml"} {
		if path != "" && !container.Get(fmt.Sprintf("volumeMounts.#(mountPath==%q)", filepath.Dir(path))).Exists() {
			t.Errorf("%s lies on no volume", path)
		}
	}
	return cfg
}

// TestKubernetesChartRefuses: values that cannot do end the installation, with words
// that say which.
func TestKubernetesChartRefuses(t *testing.T) {
	some := []string{chartKey, "--set=workers.selector=app=vllm"}
	for _, c := range []struct {
		want   string
		values []string
	}{
		{"auth.apiKey: required", []string{"--set=workers.selector=app=vllm"}},
		{"workers.selector: required", []string{chartKey}},
		{"image.repository: required", append(slices.Clip(some), "--set=image.repository=")},
		{"image.tag: required", append(slices.Clip(some), "--set=image.tag=")},
		{"workers.pool: the pool selects", append(slices.Clip(some), "--set=workers.pool=p")},
		{"workers.dns: set it", append(slices.Clip(some), "--set=workers.dns=dns://a:1")},
		{"workers.static: set it", []string{chartKey, "--set=workers.discovery=static"}},
		{"selectors and namespace require discovery kubernetes", append(slices.Clip(some), "--set=workers.discovery=none")},
		{"auth.routerApiKey: required by router.expose", append(slices.Clip(some), "--set=router.expose=true")},
		{"auth.clusterKey: required by cluster.enabled", append(slices.Clip(some), "--set=cluster.enabled=true")},
		{"auth.clusterKey: requires cluster.enabled", append(slices.Clip(some), "--set=auth.clusterKey=a-key-of-the-routers")},
		{
			"auth.clusterKey: requires cluster.enabled",
			append(slices.Clip(some), "--set=auth.clusterKey=a-key-of-the-routers", "--set=cluster.enabled=true", "--set=cluster.nats={nats://nats}"),
		},
		{"cluster.nats: requires cluster.enabled", append(slices.Clip(some), "--set=cluster.nats={nats://nats}")},
		{"auth.existingSecret: excludes", append(slices.Clip(some), "--set=auth.existingSecret=s")},
		{"endpointPicker.matchLabels: required", []string{chartKey, "--set=endpointPicker.enabled=true"}},
		{"endpointPicker.matchLabels: the pool of workers.pool", []string{chartKey, "--set=workers.pool=p", "--set=endpointPicker.enabled=true", "--set=endpointPicker.matchLabels.app=vllm"}},
		{"workers.pool: the pool selects", append(slices.Clip(some), "--set=endpointPicker.enabled=true", "--set=endpointPicker.matchLabels.app=vllm")},
		{"endpointPicker.enabled: requires", []string{chartKey, "--set=workers.discovery=none", "--set=endpointPicker.enabled=true"}},
		{"workers.namespace: an InferencePool refers", []string{chartKey, "--set=workers.namespace=gpus", "--set=endpointPicker.enabled=true", "--set=endpointPicker.matchLabels.app=vllm"}},
		{"endpointPicker.httpRoute: requires", append(slices.Clip(some), "--set=endpointPicker.httpRoute.enabled=true")},
		{"serviceAccount.name: required", append(slices.Clip(some), "--set=serviceAccount.create=false")},
		{"tls.clientCA: requires tls.secretName", append(slices.Clip(some), "--set=tls.clientCA=true")},
		{"tokenizer.model: its files are missing", append(slices.Clip(some), "--set=tokenizer.model=m")},
		{"tokenizer.fetch: requires tokenizer.model", append(slices.Clip(some), "--set=tokenizer.fetch.enabled=true")},
		{"networkPolicy.extraEgress: with workers.discovery none", []string{chartKey, "--set=workers.discovery=none", "--set=networkPolicy.enabled=true"}},
		{"'polcy' not allowed", append(slices.Clip(some), "--set=config.polcy=kv")},
		{"'replica' not allowed", append(slices.Clip(some), "--set=replica=3")},
	} {
		_, err := helm(t, append(append([]string{"template", "kvrouter", chartFolder}, chartMust...), c.values...)...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %s", c.values, err, c.want)
		}
	}
}

func TestKubernetesChartPackedIsTheSame(t *testing.T) {
	dir := t.TempDir()
	if out, err := helm(t, "package", chartFolder, "--destination="+dir); err != nil {
		t.Fatal(out, err)
	}
	packed, err := filepath.Glob(filepath.Join(dir, "kvrouter-*.tgz"))
	if err != nil || len(packed) != 1 {
		t.Fatal(packed, err)
	}
	if all := chartSets["everything"]; template(t, packed[0], all...) != template(t, chartFolder, all...) {
		t.Error("the archive makes other objects than the folder")
	}
}
