package test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
)

// fairKeys are a flood, a light tenant, and one of class batch.
const fairKeys = `
- {name: flood, key: key-flood}
- {name: light, key: key-light}
- {name: night, key: key-night, class: batch}
- {name: calm, key: key-calm, sheddable: true, ttft-ms: 1}
- {name: gateway, key: key-gateway, trust-hints: true}
`

// Numbers of prompts that are longer than others.
const (
	longTopic   = 1_000_000 // the others come meanwhile
	passTopic   = 2_000_000 // more tokens than a worker that reports no pass has room for
	passesTopic = 3_000_000 // several times as many
)

// topicLengths are how often those repeat themselves.
var topicLengths = map[int]int{longTopic: 150, passTopic: 350, passesTopic: 1400}

// streamAs begins a stream of a key and reads it to its end; nil: ctx has ended.
func (r *Router) streamAs(ctx context.Context, key string, i, tokens int, headers ...string) *http.Response {
	length := cmp.Or(topicLengths[i], 8)
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":%d,"ignore_eos":true,"stream":true}`, strings.Repeat(fmt.Sprintf("prompt %d of %s ", i, key), length), tokens)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.OpenAI+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		r.T.Error(err)
		return nil
	}
	request.Header.Set("Authorization", "Bearer "+key)
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil
	}
	io.Copy(io.Discard, response.Body)
	response.Body.Close()
	return response
}

// order begins streams of keys, one after the other, over a worker that computes one prompt
// at a time, and returns the keys in the order in which the streams end.
func order(t *testing.T, s *Router, keys ...string) (ended []string) {
	t.Helper()
	var mu sync.Mutex // guards ended
	var all sync.WaitGroup
	for i, key := range keys {
		if i == 0 {
			i = longTopic
		}
		all.Go(func() {
			if response := s.streamAs(t.Context(), "key-"+key, i, 4); response == nil || response.StatusCode != http.StatusOK {
				t.Errorf("request %d of %s: %+v", i, key, response)
			}
			mu.Lock()
			defer mu.Unlock()
			ended = append(ended, key)
		})
		testkit.Eventually(t, 10*time.Second, "one is computed, the others wait", func() bool {
			return s.InFlight() == 1 && sum(s.Metrics(), "dynamo_frontend_router_queue_pending_requests") == float64(i%longTopic)
		})
	}
	all.Wait()
	return ended
}

// TestAFloodLeavesALightTenantItsShare: its requests go after one of the flood's each, not after
// all, and those of class batch last. In the order of arrival they go as they came.
func TestAFloodLeavesALightTenantItsShare(t *testing.T) {
	t.Parallel()
	arrivals := []string{"flood", "night", "flood", "flood", "flood", "flood", "light", "light"}
	for _, policy := range []string{"fair", "fcfs"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			s := StartMocker(t, 1, "--policy=work", "--speedup-ratio=0.02", "--router-queue-threshold=0", "--router-queue-policy="+policy, keysFile(t, fairKeys))
			got := order(t, s, arrivals...)
			switch {
			case policy == "fcfs":
				if !slices.Equal(got, arrivals) {
					t.Errorf("order %v, want %v", got, arrivals)
				}
			case !slices.Contains(got[1:3], "light") || !slices.Contains(got[3:5], "light") && got[2] != "light" || got[7] != "night":
				t.Errorf("order %v", got)
			}
			page := s.Metrics()
			for _, series := range []string{`kvrouter_tenant_requests_total{tenant="flood"}`, `kvrouter_tenant_tokens_total{kind="answered",tenant="light"}`, `kvrouter_tenant_wait_seconds_total{tenant="night"}`} {
				if page[series] <= 0 {
					t.Errorf("%s is %v", series, page[series])
				}
			}
		})
	}
}

// TestALearnedQueueSharesAWorker: nothing says how much the engine takes. A light tenant with two
// requests at a time gets its half beside a flood of sixteen.
func TestALearnedQueueSharesAWorker(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	s := StartMocks(t, 1, "--mock=max-num-seqs=2", "--speedup-ratio=2", "--router-queue-policy=fair", keysFile(t, fairKeys))
	ctx, leave := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var mu sync.Mutex // guards served
	served := map[string]int{}
	count := func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		return map[string]int{"flood": served["flood"], "light": served["light"]}
	}
	client := func(key string, n int) {
		for i := 0; ctx.Err() == nil; i++ {
			if response := s.streamAs(ctx, "key-"+key, n*1000+i, 8); response != nil && response.StatusCode == http.StatusOK {
				mu.Lock()
				served[key]++
				mu.Unlock()
			}
		}
	}
	for n := range 16 {
		all.Go(func() { client("flood", n) })
	}
	testkit.Eventually(t, 30*time.Second, "the engine's limit is learned: the flood waits in the router", func() bool {
		return sum(s.Metrics(), "dynamo_frontend_router_queue_pending_requests") >= 10
	})
	for n := range 2 {
		all.Go(func() { client("light", n) })
	}
	before := count()
	testkit.Eventually(t, time.Minute, "40 requests are served", func() bool {
		now := count()
		return now["flood"]+now["light"] >= before["flood"]+before["light"]+40
	})
	after := count()
	leave()
	all.Wait()
	light, flood := after["light"]-before["light"], after["flood"]-before["flood"]
	if share := float64(light) / float64(light+flood); share < 0.3 {
		t.Errorf("the light tenant was served %d requests beside %d: a share of %.2f", light, flood, share)
	}
}

// TestShedding: a key's requests that cannot be in time are refused while the worker is busy,
// never while it is idle; what may not be shed is served late, and counted.
func TestShedding(t *testing.T) {
	t.Parallel()
	s := StartMocker(t, 1, "--policy=work", "--speedup-ratio=0.02", "--router-queue-threshold=0", "--router-queue-policy=fair", keysFile(t, fairKeys))
	if response := s.streamAs(t.Context(), "key-calm", 0, 1); response == nil || response.StatusCode != http.StatusOK {
		t.Fatalf("on an idle worker: %+v", response)
	}
	var all sync.WaitGroup
	all.Go(func() { s.streamAs(t.Context(), "key-flood", 0, 4) })
	testkit.Eventually(t, 10*time.Second, "the worker is busy", func() bool { return s.InFlight() == 1 })
	response := s.streamAs(t.Context(), "key-calm", 1, 1)
	if response == nil || response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") == "" {
		t.Errorf("on a busy worker: %+v", response)
	}
	if response := s.streamAs(t.Context(), "key-gateway", 2, 1, "x-llm-d-inference-fairness-id", "tenant-7", "x-llm-d-slo-ttft-ms", "1"); response == nil || response.StatusCode != http.StatusOK {
		t.Errorf("what may not be shed: %+v", response)
	}
	all.Wait()
	page := s.Metrics()
	for series, want := range map[string]float64{
		`kvrouter_tenant_shed_total{tenant="calm"}`:                            1,
		`kvrouter_tenant_objectives_total{result="missed",tenant="tenant-7"}`:  1,
		`kvrouter_tenant_objectives_total{result="kept",tenant="tenant-7"}`:    0,
		`kvrouter_tenant_waiting_requests{class="standard",tenant="tenant-7"}`: 0,
		`kvrouter_tenant_requests_total{tenant="tenant-7"}`:                    1,
	} {
		if got, shown := page[series]; got != want || !shown {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	if got := gjson.GetBytes(s.Get(s.Port+"/tenants"), `tenants.#(tenant=="calm").shed`).Int(); got != 1 {
		t.Errorf("GET /tenants: %d shed", got)
	}
}

// TestObjectives: the worker that computes a long prompt gets no request that would miss its
// objective there, and whether objectives were kept is counted.
func TestObjectives(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--policy=round-robin", "--speedup-ratio=0.2", "--decision-headers", keysFile(t, fairKeys))
	busy := s.streamAs(t.Context(), "key-gateway", 1, 16, "x-llm-d-inference-fairness-id", "kept", "x-llm-d-slo-ttft-ms", "60000", "x-llm-d-slo-tpot-ms", "60000").Header.Get(web.HeaderWorker)
	for i := range 3 {
		s.streamAs(t.Context(), "key-gateway", 10+i, 16, "x-llm-d-inference-fairness-id", "missed", "x-llm-d-slo-tpot-ms", "0.001")
	}
	ctx, leave := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { s.streamAs(ctx, "key-gateway", passesTopic, 1, hints.HeaderPinnedWorker, busy) })
	testkit.Eventually(t, 10*time.Second, "the worker is busy", func() bool { return s.InFlight() == 1 })
	for i := range 3 {
		response := s.streamAs(t.Context(), "key-gateway", 20+i, 8, "x-llm-d-slo-ttft-ms", "1000")
		if response == nil || busy == "" || response.Header.Get(web.HeaderWorker) == busy {
			t.Errorf("a request goes where its first token comes late: %+v", response)
		}
	}
	leave()
	all.Wait()
	page := s.Metrics()
	for series, want := range map[string]float64{
		`kvrouter_tenant_objectives_total{result="kept",tenant="kept"}`:           1,
		`kvrouter_tenant_token_objectives_total{result="kept",tenant="kept"}`:     1,
		`kvrouter_tenant_token_objectives_total{result="missed",tenant="kept"}`:   0,
		`kvrouter_tenant_token_objectives_total{result="missed",tenant="missed"}`: 3,
	} {
		if got, shown := page[series]; got != want || !shown {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
}

// TestWeightsAreReloaded: SIGHUP changes the terms of requests from then on.
func TestWeightsAreReloaded(t *testing.T) {
	t.Parallel()
	flag := keysFile(t, "- {name: a, key: key-a, weight: 2}")
	s := StartMocker(t, 1, "--policy=work", "--speedup-ratio=0.02", "--router-queue-policy=fair", flag)
	_, name, _ := strings.Cut(flag, "=")
	weight := func(want float64) {
		t.Helper()
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() { s.streamAs(ctx, "key-a", int(want), 500) })
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("a request of weight %v runs", want), func() bool {
			record := gjson.GetBytes(s.Get(s.Port+"/tenants"), `tenants.#(tenant=="a")`)
			return record.Get("running").Int() == 1 && record.Get("weight").Float() == want
		})
		leave()
		all.Wait()
	}
	weight(2)
	testkit.WriteFile(t, filepath.Clean(name), "- {name: a, key: key-a, weight: 4, class: batch}")
	s.signal(syscall.SIGHUP)
	s.says("SIGHUP: reloaded")
	weight(4)
}

// TestTwoRoutersShareOneWorker: a light tenant at one router goes before a flood whose request runs
// at the other one, although the flood came first.
func TestTwoRoutersShareOneWorker(t *testing.T) {
	t.Parallel()
	farm := StartWorkers(t, 1, "--speedup-ratio=0.15")
	ports := testkit.FreePorts(t, 2)
	var routers []*Mocks
	for i := range 2 {
		routers = append(routers, StartOverAt(t, Program, testkit.FreePorts(t, 2), farm, "--policy=work", "--router-queue-policy=fair", keysFile(t, fairKeys),
			"--cluster=test", fmt.Sprintf("--cluster-port=%d", ports+i), fmt.Sprintf("--cluster-peers=127.0.0.1:%d", ports+1-i)))
	}
	for _, r := range routers {
		testkit.Eventually(t, 20*time.Second, "the routers hear each other", func() bool { return r.Metrics()["kvrouter_cluster_peers"] == 1 })
	}
	first, second := routers[0], routers[1]
	waiting := func(r *Mocks) float64 { return sum(r.Metrics(), "dynamo_frontend_router_queue_pending_requests") }
	var all sync.WaitGroup
	var mu sync.Mutex // guards ended
	var ended []string
	send := func(r *Mocks, key string, i int) {
		all.Go(func() {
			if response := r.streamAs(t.Context(), "key-"+key, i, 4); response == nil || response.StatusCode != http.StatusOK {
				t.Errorf("request %d of %s: %+v", i, key, response)
			}
			mu.Lock()
			defer mu.Unlock()
			ended = append(ended, key)
		})
	}
	send(first, "flood", passesTopic)
	testkit.Eventually(t, 10*time.Second, "the flood runs at the first router, and the second one knows", func() bool { return first.InFlight() == 1 && second.InFlight() == 1 })
	send(second, "flood", passTopic)
	testkit.Eventually(t, 10*time.Second, "it waits at the second router", func() bool { return waiting(second) == 1 })
	send(second, "light", passTopic)
	testkit.Eventually(t, 10*time.Second, "so does the light tenant", func() bool { return waiting(second) == 2 })
	testkit.Eventually(t, 10*time.Second, "the second router knows what runs at the first", func() bool {
		return gjson.GetBytes(second.Get(second.Port+"/tenants"), `tenants.#(tenant=="flood").elsewhere_ms`).Float() > 0
	})
	all.Wait()
	if want := []string{"flood", "light", "flood"}; !slices.Equal(ended, want) {
		t.Errorf("order %v, want %v", ended, want)
	}
}
