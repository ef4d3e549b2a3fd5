package openai

import (
	"io"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/selection"
)

func TestSelectionRefusesBodiesOver8MiB(t *testing.T) {
	h := newTestAPI(t, setup{}, "http://a")
	for _, path := range []string{"/select", "/workers", "/reservations", "/route", "/find_best_worker"} {
		response, err := h.selection.Client().Post(h.selection.URL+path, "application/json", strings.NewReader(`{"token_ids":"`+strings.Repeat("x", selection.SelectionBodyLimit)+`"}`))
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != 413 || !strings.Contains(gjson.GetBytes(answer, "error").String(), "8388608") {
			t.Errorf("%s: %s %s", path, response.Status, answer)
		}
	}
}
