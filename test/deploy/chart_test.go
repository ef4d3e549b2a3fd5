package deploy

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"
)

var update = flag.Bool("update", false, "write the files of the chart that are made from others")

// Where the chart and its parts are.
const (
	chartFolder = "deploy/helm/kvrouter"
	chartSchema = chartFolder + "/values.schema.json"
	chartValues = chartFolder + "/values.yaml"
	chartAll    = "testdata/chart/everything.yaml"
)

// chartCopies are the files of the chart that are the same as others: a chart can read
// only what lies in it, and not everybody who packs one follows links.
var chartCopies = map[string]string{chartFolder + "/files/alerts.yaml": AlertsFile, chartFolder + "/files/dashboard.json": BoardFile}

// chartTemplates returns the text of all templates.
func chartTemplates(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob(chartFolder + "/templates/*")
	if err != nil || len(files) < 8 {
		t.Fatal(files, err)
	}
	var all strings.Builder
	for _, file := range files {
		all.WriteString(Read(t, strings.TrimPrefix(file, "deploy/")))
	}
	return all.String()
}

func TestChartHasTheAlertsAndTheBoard(t *testing.T) {
	for to, from := range chartCopies {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.WriteFile(to, text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if has, err := os.ReadFile(to); err != nil || !bytes.Equal(has, text) {
			t.Errorf("%s is not the same as %s (%v): run go test ./test/deploy -run TestChart -update", to, from, err)
		}
	}
	for _, expr := range regexp.MustCompile(`job="(\w+)"`).FindAllStringSubmatch(Read(t, "prometheus/alerts.yaml"), -1) {
		if !strings.Contains(chartTemplates(t), "{targetLabel: job, replacement: "+expr[1]+"}") {
			t.Errorf("the alerts ask for job %s, which no ServiceMonitor here gives", expr[1])
		}
	}
}

// settableFlags are the keys of the value config: the flags that a serving router reads,
// without those that the templates set, and without keys, which belong into a Secret.
// The image's environment says which engine is started; a file would not overrule it.
func settableFlags(t *testing.T) (all []string) {
	t.Helper()
	own := []string{"config", "engine", "api-key", "router-api-key", "cluster-key"}
	for _, match := range regexp.MustCompile(`set \$config "([^"]+)"`).FindAllStringSubmatch(chartTemplates(t), -1) {
		own = append(own, match[1])
	}
	for flag := range Flags(t) {
		if !slices.Contains(own, flag) {
			all = append(all, flag)
		}
	}
	slices.Sort(all)
	return all
}

func TestChartSchemaKnowsEveryFlag(t *testing.T) {
	text, err := os.ReadFile(chartSchema)
	if err != nil {
		t.Fatal(err)
	}
	const at = "properties.config.properties"
	want := settableFlags(t)
	if *update {
		var block strings.Builder
		for i, flag := range want {
			fmt.Fprintf(&block, "%s\n        %q: {\"$ref\": \"#/definitions/setting\"}", []string{"{", ","}[min(i, 1)], flag)
		}
		if text, err = sjson.SetRawBytes(text, at, []byte(block.String()+"\n      }")); err == nil {
			err = os.WriteFile(chartSchema, text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	var has []string
	gjson.GetBytes(text, at).ForEach(func(key, _ gjson.Result) bool {
		has = append(has, key.Str)
		return true
	})
	if !slices.Equal(has, want) {
		t.Errorf("%s: config has not the keys that are flags: run go test ./test/deploy -run TestChart -update", chartSchema)
	}
}

// TestChartNamesFlagsThatExist looks at all that the templates and the values call a
// flag, a key of the file of settings or a variable.
func TestChartNamesFlagsThatExist(t *testing.T) {
	known := []string{"help", "version"}
	var variables []string
	for name, flag := range Flags(t) {
		known, variables = append(known, name), append(variables, flag.Env)
	}
	text := chartTemplates(t) + Read(t, "helm/kvrouter/values.yaml")
	found := 0
	for _, match := range regexp.MustCompile(`(?:set \$config "|[\s(\[]--|\b(KVROUTER_))([a-zA-Z][a-zA-Z0-9._-]*)`).FindAllStringSubmatch(text, -1) {
		found++
		if match[1] != "" && !slices.Contains(variables, match[1]+match[2]) || match[1] == "" && !slices.Contains(append(known, "enable-scale-out"), strings.TrimRight(match[2], ".")) {
			t.Errorf("%q is no flag and no variable of one", match[0])
		}
	}
	if found < 40 {
		t.Errorf("only %d names were found", found)
	}
}

// schemaOf compiles the schema, which is held against the schema of schemas.
func schemaOf(t *testing.T) *jsonschema.Schema {
	t.Helper()
	schema, err := jsonschema.NewCompiler().Compile(chartSchema)
	if err != nil {
		t.Fatal(err)
	}
	return schema
}

// readValues reads a file of values.
func readValues(t *testing.T, file string) (values map[string]any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(text, &values)
	}
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return values
}

func TestChartSchemaTakesItsValuesAndNamesWrongOnes(t *testing.T) {
	schema := schemaOf(t)
	examples, err := filepath.Glob(chartFolder + "/examples/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(examples, chartValues, chartAll) {
		if strings.Contains(file, "vllm") { // objects
			continue
		}
		if err := schema.Validate(readValues(t, file)); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	for text, want := range map[string]string{
		"replica: 2":                              "'replica' not allowed",
		"workers: {labels: app=vllm}":             "'labels' not allowed",
		"config: {polcy: work}":                   "'polcy' not allowed",
		"config: {http_port: 1}":                  "'http_port' not allowed",
		"config: {http-port: 1}":                  "'http-port' not allowed",
		"config: {api-key: k}":                    "'api-key' not allowed",
		"config: {policy: {a: b}}":                "at '/config/policy'",
		"replicas: two":                           "at '/replicas'",
		"workers: {discovery: etcd}":              "at '/workers/discovery'",
		"workers: {port: 70000}":                  "at '/workers/port'",
		"workers: {static: [http://gpu-1:8100]}":  "at '/workers/static/0'",
		"cluster: {discovery: etcd}":              "at '/cluster/discovery'",
		"cluster: {name: a.b}":                    "at '/cluster/name'",
		"cluster: {nats: [nats-1:4222]}":          "at '/cluster/nats/0'",
		"cluster: {nats: ['nats://a:b@nats']}":    "at '/cluster/nats/0'",
		"endpointPicker: {failureMode: Open}":     "at '/endpointPicker/failureMode'",
		"endpointPicker: {targetPorts: []}":       "at '/endpointPicker/targetPorts'",
		"endpointPicker: {httpRoute: {name: a}}":  "'name' not allowed",
		"auth: {clusterKey: short}":               "at '/auth/clusterKey'",
		"fullnameOverride: Upper":                 "at '/fullnameOverride'",
		"readinessProbe: {httpGet: {path: /}}":    "'httpGet' not allowed",
		"image: {tag: 1.0}":                       "at '/image/tag'",
		"networkPolicy: {apiServerPorts: [http]}": "at '/networkPolicy/apiServerPorts/0'",
	} {
		var values map[string]any
		if err := yaml.Unmarshal([]byte(text), &values); err != nil {
			t.Fatal(err)
		}
		if err := schema.Validate(values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

// TestChartValuesAreExplainedCheckedAndUsed holds values.yaml, its schema and the
// templates against each other.
func TestChartValuesAreExplainedCheckedAndUsed(t *testing.T) {
	text, err := os.ReadFile(chartSchema)
	if err != nil {
		t.Fatal(err)
	}
	templates := chartTemplates(t)
	// What has no default, or is read where its name is not.
	silent := []string{"global", "config", "lifecycle", "resources"}
	var compare func(path string, schema gjson.Result, values map[string]any)
	compare = func(path string, schema gjson.Result, values map[string]any) {
		if schema.Get("additionalProperties").Raw != "false" {
			t.Errorf("the schema takes any key in %q", path)
		}
		schema.Get("properties").ForEach(func(key, inner gjson.Result) bool {
			at := strings.TrimPrefix(path+"."+key.Str, ".")
			value, there := values[key.Str]
			if slices.Contains(silent, at) {
				return true
			}
			if !there {
				t.Errorf("%s has no %s, which the schema has", chartValues, at)
			}
			if !regexp.MustCompile(`\.` + key.Str + `\b`).MatchString(templates) {
				t.Errorf("no template uses %s", at)
			}
			if inner.Get("properties").Exists() {
				has, _ := value.(map[string]any)
				compare(at, inner, has)
			}
			return true
		})
	}
	compare("", gjson.ParseBytes(text), readValues(t, chartValues))
}

// TestChartExampleRunsVLLMAsTheRouterWantsIt holds the example of workers against the
// values that find them, the router's defaults and docs/workers.md.
func TestChartExampleRunsVLLMAsTheRouterWantsIt(t *testing.T) {
	var worker struct {
		Metadata struct{ Namespace string }
		Spec     struct {
			Template struct {
				Metadata struct{ Labels map[string]string }
				Spec     struct {
					Containers []struct {
						Args  []string
						Ports []struct {
							Port int `yaml:"containerPort"`
						}
					}
				}
			}
		}
	}
	first, _, _ := strings.Cut(Read(t, "helm/kvrouter/examples/vllm.yaml"), "\n---\n")
	if err := yaml.Unmarshal([]byte(first), &worker); err != nil || len(worker.Spec.Template.Spec.Containers) != 1 {
		t.Fatal(err, worker)
	}
	container := worker.Spec.Template.Spec.Containers[0]
	for _, flag := range []string{"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"} {
		if !slices.Contains(container.Args, flag) {
			t.Errorf("there is no %s", flag)
		}
	}
	value := func(flag string) string { return container.Args[slices.Index(container.Args, flag)+1] }
	flags := Flags(t)
	usual := func(flag string) string { return flags[flag].Default }
	events := value("--kv-events-config")
	if !json.Valid([]byte(events)) || !strings.Contains(Read(t, "../docs/workers.md"), "--kv-events-config '"+events+"'") {
		t.Errorf("it publishes in another way than docs/workers.md says: %s", events)
	}
	if value("--host") != "0.0.0.0" || value("--block-size") != usual("block-size") || value("--port") != usual("worker-port") {
		t.Errorf("%q for blocks of %s and port %s", container.Args, usual("block-size"), usual("worker-port"))
	}
	if !strings.Contains(events, fmt.Sprintf(`"endpoint":"tcp://*:%s"`, usual("base-kv-events-port"))) || !strings.Contains(events, fmt.Sprintf(`"replay_endpoint":"tcp://*:%s"`, usual("base-kv-replay-port"))) {
		t.Errorf("events and replay: %s", events)
	}
	for _, p := range container.Ports {
		if port := strconv.Itoa(p.Port); value("--port") != port && !strings.Contains(events, "*:"+port+`"`) {
			t.Errorf("nothing listens on port %s", port)
		}
	}
	labels := readValues(t, chartFolder+"/examples/labels.yaml")
	found, _ := labels["workers"].(map[string]any)
	set := []string{}
	for key, value := range worker.Spec.Template.Metadata.Labels {
		set = append(set, key+"="+value)
	}
	if found["selector"] != strings.Join(set, ",") || found["namespace"] != worker.Metadata.Namespace {
		t.Errorf("the values look for %v, the Pods have %v", found, set)
	}
	if config, _ := labels["config"].(map[string]any); fmt.Sprint(config["block-size"]) != value("--block-size") {
		t.Errorf("the values say %v", maps.Collect(maps.All(config)))
	}
}
