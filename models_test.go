package main

import (
	"fmt"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/mocker"
	"kvrouter/internal/models"
)

// entries lists the workers of a site as a file of workers does.
func (s *mockSite) entries(name string) (list []string) {
	for i := range s.app.config.NumWorkers {
		list = append(list, fmt.Sprintf("{name: %s%d, url: %q}", name, i, s.workerURL(i)))
	}
	return list
}

// tokensAt returns the number of tokens and the tokens that POST /tokenize gives.
func tokensAt(t *testing.T, url string, body []byte) string {
	t.Helper()
	_, answer := post(t, url+"/tokenize", string(body))
	return fmt.Sprint(gjson.GetBytes(answer, "count").Int(), " ", gjson.GetBytes(answer, "tokens").Raw)
}

// of is a model of the router.
func (s *mockSite) of(t *testing.T, name string) *models.Model {
	t.Helper()
	m, known := s.app.models.Of(name)
	if !known {
		t.Fatalf("no model %s", name)
	}
	return m
}

// overlap tells the most tokens of a chat that a worker of the model is known to hold,
// and whether there are any.
func (s *mockSite) overlap(t *testing.T, m *models.Model, text, model string) (most int, some bool) {
	t.Helper()
	_, answer := post(t, s.openAI+"/tokenize", string(mocker.MustJSON(map[string]any{"model": model, "messages": say(text)})))
	lora := ""
	if model == "sql" || model == "legal" {
		lora = model
	}
	_, scores := post(t, s.selection+"/overlap_scores", fmt.Sprintf(`{"model_name":%q,"lora_name":%q,"token_ids":%s}`, model, lora, gjson.GetBytes(answer, "tokens").Raw))
	if size := gjson.GetBytes(scores, "block_size").Int(); size != int64(m.Router.BlockSize()) {
		t.Errorf("scores of %s in blocks of %d: %s", model, size, scores)
	}
	for _, blocks := range gjson.GetBytes(scores, "workers.#.device_blocks").Array() {
		most = max(most, int(blocks.Int())*m.Router.BlockSize())
	}
	return most, most > 0
}
