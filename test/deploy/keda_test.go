package deploy

import (
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"kvrouter/test"
)

// TestTheScaledObjectAsksForWhatRoutersShow holds deploy/keda/scaledobject.yaml against
// the metrics page.
func TestTheScaledObjectAsksForWhatRoutersShow(t *testing.T) {
	type trigger struct {
		Type     string
		Metadata map[string]string
	}
	var object struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		Spec       struct {
			ScaleTargetRef  struct{ Kind, Name string } `yaml:"scaleTargetRef"`
			MinReplicaCount *int                        `yaml:"minReplicaCount"`
			MaxReplicaCount int                         `yaml:"maxReplicaCount"`
			CooldownPeriod  int                         `yaml:"cooldownPeriod"`
			Triggers        []trigger
		}
	}
	if err := yaml.Unmarshal([]byte(Read(t, "keda/scaledobject.yaml")), &object); err != nil {
		t.Fatal(err)
	}
	spec := object.Spec
	for _, trigger := range spec.Triggers {
		if trigger.Metadata["ignoreNullValues"] != "false" {
			t.Errorf("%v: no answer of Prometheus would take workers away", trigger)
		}
	}
	if object.APIVersion != "keda.sh/v1alpha1" || object.Kind != "ScaledObject" || spec.ScaleTargetRef.Name == "" || spec.MinReplicaCount == nil || *spec.MinReplicaCount != 0 || spec.MaxReplicaCount < 2 || spec.CooldownPeriod < 60 {
		t.Errorf("%+v", object)
	}
	s := test.StartMocks(t, 1)
	if _, err := s.Chat(t.Context(), test.Say("Hi"), false, 2); err != nil {
		t.Fatal(err)
	}
	series := map[string][]string{}
	addSeries(t, s.Router, series)
	asked := ""
	for i, trigger := range spec.Triggers {
		query := trigger.Metadata["query"]
		if trigger.Type != "prometheus" || trigger.Metadata["serverAddress"] == "" || trigger.Metadata["threshold"] == "" {
			t.Errorf("trigger %d: %+v", i, trigger)
		}
		if _, problems := checkExpression(query, series, "kvrouter"); len(problems) > 0 {
			t.Errorf("%s: %v", query, problems)
		}
		asked += query
	}
	for _, name := range []string{"kvrouter_saturation", "kvrouter_held_requests"} {
		if !strings.Contains(asked, name) {
			t.Errorf("no trigger asks for %s", name)
		}
	}
	if document := Read(t, "../docs/scaling.md"); !strings.Contains(document, "deploy/keda/scaledobject.yaml") {
		t.Error("docs/scaling.md does not name it")
	}
}
