package telemetry

import (
	"strings"

	"kvrouter/internal/workers"
)

// maxLabel bounds a label whose value comes from a worker, in bytes.
const maxLabel = 200

// infoLabels returns the values of url, model, role and engine. Models are named by
// workers: the names are cut and made valid UTF-8, without which a label panics.
func infoLabels(s workers.Sample) []string {
	model := ""
	if len(s.Models) > 0 {
		model = s.Models[0]
	}
	return []string{boundedLabel(s.URL), boundedLabel(model), s.Role.String(), s.Engine.String()}
}

// boundedLabel makes a label of what others say.
func boundedLabel(value string) string {
	return strings.ToValidUTF8(value[:min(len(value), maxLabel)], "")
}
