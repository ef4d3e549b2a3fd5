package kv

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

func TestSecretsAreNeverShown(t *testing.T) {
	const key = "sesame"
	target := Target{URL: "http://h:1", Bearer: key}
	encoded, err := json.Marshal(target)
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	for _, handler := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		slog.New(handler).Info("x", "target", target, "key", target.Bearer)
	}
	shown := fmt.Sprintf("%v %+v %#v %s %q %x %s", target, target, target, target.Bearer, target.Bearer, target.Bearer, encoded) + log.String()
	if strings.Contains(shown, key) || strings.Contains(shown, fmt.Sprintf("%x", key)) {
		t.Errorf("the key is shown: %s", shown)
	}
	if fmt.Sprint(Secret("")) != "" {
		t.Error("no key is shown as one")
	}
	var read struct{ Key Secret }
	if err := json.Unmarshal([]byte(`{"Key":"sesame"}`), &read); err != nil || string(read.Key) != key {
		t.Errorf("read as %q, %v", string(read.Key), err)
	}
}
