package telemetry

import (
	"strings"

	"kvrouter/internal/kv"
)

// WorkerInfo is what a worker is, as labels of kvrouter_worker_info.
type WorkerInfo struct {
	URL    string
	Models []string // that it serves, its own first; the first becomes the label
	Role   kv.Role
	Engine kv.Engine
}

// maxLabel bounds a label whose value comes from a worker, in bytes.
const maxLabel = 200

// labels returns the values of url, model, role and engine. Models are named by
// workers: the names are cut and made valid UTF-8, without which a label panics.
func (i WorkerInfo) labels() []string {
	model := ""
	if len(i.Models) > 0 {
		model = i.Models[0]
	}
	return []string{boundedLabel(i.URL), boundedLabel(model), i.Role.String(), i.Engine.String()}
}

// boundedLabel makes a label of what others say.
func boundedLabel(value string) string {
	return strings.ToValidUTF8(value[:min(len(value), maxLabel)], "")
}
