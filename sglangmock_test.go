package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
)

// sglangMockKinds are those of sglangKinds that mock workers serve.
func sglangMockKinds() (kinds [][2]string) {
	for _, kind := range sglangKinds {
		if kind.path != "/v1/responses" && kind.path != "/v1/messages" {
			body := kind.body
			if kind.path == testkit.ChatPath { // only then a stream tells what was cached
				body = strings.Replace(body, `"stream":true}`, `"stream":true,"stream_options":{"include_usage":true}}`, 1)
			}
			kinds = append(kinds, [2]string{kind.path, body})
		}
	}
	return append(kinds,
		[2]string{"/generate", `{"text":[%s],"sampling_params":{"max_new_tokens":40,"ignore_eos":true}}`},
		[2]string{"/generate", `{"text":%s,"cache_salt":"tenant","sampling_params":{"max_new_tokens":4}}`})
}

// TestPredictionsAreExactOnSGLangMocks sends requests of all kinds, over a cache that
// is too small for them, to a router that started the workers and to one that knows no
// more than their URL.
func TestPredictionsAreExactOnSGLangMocks(t *testing.T) {
	s := startMockSite(t, 1, "--mock-api=sglang", "--mock-data-parallel-size=2", "--block-size=16", "--mock-num-gpu-blocks=240")
	url := s.workerURL(0)
	attached := attachTo(t, s, "--block-size=16")
	second, other := attached.site, attached.app
	targets := other.router.Targets()
	if len(targets) != 2 || targets[0].Engine != kv.EngineSGLang || s.app.router.Targets()[0].Engine != kv.EngineSGLang {
		t.Fatalf("%+v", targets)
	}
	random := rand.New(rand.NewPCG(3, 3))
	texts := make([]string, 6)
	for i := range texts {
		texts[i] = words(random, 40+20*i)
	}
	follow := func() {
		t.Helper()
		s.settle()
		testkit.Eventually(t, 20*time.Second, "the same blocks in both indexes", func() bool {
			for _, target := range targets {
				if s.app.index.Blocks(target.Key) != other.index.Blocks(target.Key) || other.fleet.Streams()[target.Key].LastSeq.Load() != s.app.fleet.Streams()[target.Key].LastSeq.Load() {
					return false
				}
			}
			return true
		})
	}
	follow()
	cached := 0
	s.site.t, second.t = t, t
	kinds := sglangMockKinds()
	for i := range 10 * len(kinds) {
		kind := kinds[i%len(kinds)]
		text := &texts[random.IntN(len(texts))]
		from := []*site{s.site, second}[i/len(kinds)%2]
		a := from.ask(kind[0], fmt.Sprintf(kind[1], proxy.Quoted(*text)))
		if a.status != http.StatusOK || a.prompt == 0 && kind[1][1:8] != `"text":` {
			t.Fatalf("%s: %d %s", kind, a.status, a.answer)
		}
		if strings.HasPrefix(string(a.answer), "[") {
			a.cached = int(gjson.GetBytes(a.answer, "0.meta_info.cached_tokens").Int())
		}
		if a.predicted != a.cached {
			t.Errorf("request %d, %s: predicted %d, cached %d of %d", i, kind, a.predicted, a.cached, a.prompt)
		}
		cached += a.cached
		follow()
		if random.IntN(3) == 0 {
			*text += " " + words(random, 20)
		}
		if i == 50 {
			if status, answer := post(t, url+"/flush_cache", ""); status != http.StatusOK {
				t.Fatalf("%d %s", status, answer)
			}
			follow()
			if n := other.index.Blocks(targets[0].Key) + other.index.Blocks(targets[1].Key); n > 0 {
				t.Errorf("%d blocks are left after a flush", n)
			}
		}
	}
	if _, page := testkit.HTTPGet(t, url+"/metrics"); cached == 0 || sumOf(page, "sglang:evicted_tokens_total") == 0 {
		t.Errorf("%d tokens were cached: the test shows nothing\n%s", cached, page)
	}
	for _, key := range []kv.WorkerKey{{Rank: 0}, {Rank: 1}} {
		if s.rank(key).Counts.PromptTokens.Load() == 0 {
			t.Errorf("%v was never used", key)
		}
	}

	// What an extra_key keeps apart is never predicted across.
	shared := words(random, 100)
	for i, extra := range []string{`,"extra_key":"a"`, ``, `,"extra_key":"a"`, `,"extra_key":"b"`, ``} {
		a := s.site.ask("/generate", fmt.Sprintf(`{"text":%s%s,"sampling_params":{"max_new_tokens":1}}`, proxy.Quoted(shared), extra))
		if a.status != http.StatusOK || a.predicted > a.cached {
			t.Errorf("extra_key, request %d: %+v", i, a)
		}
		follow()
	}
}

// TestLoadOfSGLangMocksIsSeenAtOnce: a queue on one worker, of which the router has
// sent nothing, is known within a second, also where the worker is attached.
func TestLoadOfSGLangMocksIsSeenAtOnce(t *testing.T) {
	s := startMockSite(t, 2, "--mock-api=sglang", "--speedup-ratio=1", "--mock-max-num-seqs=2")
	s.site.t = t
	other := attachTo(t, s).app
	ctx, leave := context.WithCancel(t.Context())
	const queue = 6
	left := make(chan struct{}, queue)
	for i := range queue {
		go func() {
			defer func() { left <- struct{}{} }()
			request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.workerURL(0)+"/generate",
				strings.NewReader(fmt.Sprintf(`{"text":"number %d","sampling_params":{"max_new_tokens":3000,"ignore_eos":true}}`, i)))
			request.Header.Set("Content-Type", "application/json")
			if response, err := http.DefaultClient.Do(request); err == nil {
				response.Body.Close()
			}
		}()
	}
	busy := s.app.mocker.Worker(0).Ranks[0]
	testkit.Eventually(t, 10*time.Second, "a queue", func() bool { return busy.CurrentLoad().Waiting == queue-2 })
	for name, r := range map[string]*router.Router{"started": s.app.router, "attached": other.router} {
		testkit.Eventually(t, time.Second, name+": the load is seen", func() bool {
			load := r.Load(kv.WorkerKey{})
			return load.Running == 2 && load.Waiting == queue-2
		})
	}
	for range 20 {
		a := s.site.ask("/generate", `{"text":"something new","sampling_params":{"max_new_tokens":1}}`)
		if a.status != http.StatusOK || a.worker != "1" {
			t.Fatalf("worker %s, %d %s", a.worker, a.status, a.answer)
		}
	}
	leave()
	for range queue {
		<-left
	}
}

// TestSGLangMockPairsAreSpokenToAsTheyCan: several answers, which hang in a pair, are
// refused at once; several prompts, streams and /generate go through.
func TestSGLangMockPairsAreSpokenToAsTheyCan(t *testing.T) {
	s := startMockPairs(t, kv.KindSGLang, 1, 1, "--mock-api=sglang", "--block-size=16")
	s.site.t = t
	long := proxy.Quoted(strings.Repeat("hand me over ", 20))
	for _, c := range []struct {
		path, body string
		status     int
	}{
		{"/v1/completions", `{"prompt":%s,"n":2,"max_tokens":3}`, http.StatusBadRequest},
		{"/generate", `{"text":%s,"sampling_params":{"n":2}}`, http.StatusBadRequest},
		{testkit.ChatPath, `{"messages":[{"role":"user","content":%s}],"max_tokens":3}`, http.StatusOK},
		{testkit.ChatPath, `{"messages":[{"role":"user","content":%s}],"max_tokens":3,"stream":true}`, http.StatusOK},
		{"/v1/completions", `{"prompt":[%[1]s,%[1]s],"max_tokens":3}`, http.StatusOK},
		{"/generate", `{"text":%s,"sampling_params":{"max_new_tokens":3}}`, http.StatusOK},
		{"/generate", `{"text":%s,"sampling_params":{"max_new_tokens":3},"stream":true}`, http.StatusOK},
		{"/generate", `{"text":[%[1]s,%[1]s],"sampling_params":{"max_new_tokens":3}}`, http.StatusOK},
	} {
		began := time.Now()
		if a := s.site.ask(c.path, fmt.Sprintf(c.body, long)); a.status != c.status || time.Since(began) > 10*time.Second || strings.Contains(string(a.answer), `"abort"`) {
			t.Errorf("%s %s: %d after %s: %s", c.path, c.body, a.status, time.Since(began), a.answer)
		}
	}
	testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
}
