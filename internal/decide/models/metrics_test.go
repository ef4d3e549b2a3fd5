package models_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/nativetest"
	"kvrouter/internal/testkit/routertest"
)

func TestWorkersAreShownUnderTheTypeThatTheyHave(t *testing.T) {
	rt := routertest.New(t, "kv", 1)
	metrics := models.NewCollector(routertest.Models(rt), nil)
	target := kv.Target{Key: kv.WorkerKey{Worker: 1}, Disagg: kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindNIXL}}
	rt.Up(target)
	rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 2}, Disagg: kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}})
	shown := func(when string, want ...string) {
		t.Helper()
		for _, name := range []string{"dynamo_frontend_worker_active_decode_blocks", "dynamo_frontend_worker_active_prefill_tokens"} {
			n := 0
			for line := range testkit.Scrape(t, metrics) {
				if strings.HasPrefix(line, name) {
					n++
				}
			}
			if n != len(want) {
				t.Errorf("%s: %s has %d series, want %d", when, name, n, len(want))
			}
			for worker, kind := range want {
				if _, has := testkit.Scrape(t, metrics)[fmt.Sprintf(`%s{dp_rank="0",worker_id="%d",worker_type="%s"}`, name, worker, kind)]; !has {
					t.Errorf("%s: %s does not show worker %d as %s", when, name, worker, kind)
				}
			}
		}
	}
	shown("all up", "decode", "prefill", "decode")
	booking, err := rt.Book(router.Request{NumTokens: 9}, target.Key)
	if err != nil {
		t.Fatal(err)
	}
	rt.Down(kv.WorkerKey{Worker: 2})
	rt.Down(target.Key)
	shown("down with a request in flight", "decode", "prefill")
	target.Disagg = kv.Disagg{}
	rt.Up(target)
	shown("back in another role", "decode", "decode")
	booking.End()
	rt.Down(target.Key)
	shown("gone", "decode")
}

// TestAModelWhoseFilesAreRefusedIsShownAndDoesNotAffectOthers: its prompts, or only its
// chats, go to workers.
func TestAModelWhoseFilesAreRefusedIsShownAndDoesNotAffectOthers(t *testing.T) {
	nativetest.Library(t)
	dir := t.TempDir()
	for _, name := range []string{"good", "evil", "loops"} {
		testkit.TokenizerFolder(t, filepath.Join(dir, name))
	}
	testkit.WriteFiles(t, dir, map[string]string{
		"evil/tokenizer.json":       strings.Repeat("[", 100_000),
		"loops/chat_template.jinja": `{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}`,
	})
	var out bytes.Buffer
	s := newLoggingSet(t, slog.New(slog.NewTextHandler(&out, nil)), models.Settings{Flags: models.Flags{ModelsDir: dir}, ServedModelName: "a"})
	metrics := models.NewCollector(s, nil)
	for i, name := range []string{"evil", "good", "loops"} {
		join(t, s, uint64(i+1), serves("", name))
	}
	shown := testkit.Scrape(t, metrics)
	for name, tokenizer := range map[string]string{"a": "workers", "good": "router", "evil": "refused", "loops": "refused"} {
		found := false
		for series := range shown {
			found = found || strings.HasPrefix(series, "kvrouter_model_info{") && strings.Contains(series, `model="`+name+`"`) && strings.Contains(series, `tokenizer="`+tokenizer+`"`)
		}
		if !found {
			t.Errorf("%s is not shown with the tokenizer %s", name, tokenizer)
		}
	}
	parsed, _ := jsonbody.Parse([]byte(`{"prompt":"a b"}`))
	for name, source := range map[string]string{"good": tokens.SourceLocal, "loops": tokens.SourceLocal, "evil": tokens.SourceNone} {
		m, _ := s.Of(name)
		if prompts := m.Tokens.CompletionBody(t.Context(), parsed); prompts[0].Source != source {
			t.Errorf("%s: the prompt is from %q, want %q", name, prompts[0].Source, source)
		}
	}
	log := out.String()
	for _, want := range []string{"levels deep", "fuel"} {
		if strings.Count(log, want) != 1 {
			t.Errorf("the log names %q %d times:\n%s", want, strings.Count(log, want), log)
		}
	}
}
