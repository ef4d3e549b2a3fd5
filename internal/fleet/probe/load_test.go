package probe

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

const metricsPage = `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:%s gauge
vllm:%s{engine="0",model_name="m"} 0.25
vllm:%s{engine="1",model_name="m"} 0.5
`

func noKey() kv.Secret { return "" }

// newClient returns a Client that logs nothing and closes with the test.
func newClient(t testing.TB) *Client {
	c := New(Settings{}, nil, slog.New(slog.DiscardHandler))
	t.Cleanup(c.Close)
	return c
}

// loadOn reads the load of an engine out of a page.
func loadOn(page, engine string) (policy.Published, error) {
	shown, err := ParsePage(strings.NewReader(page))
	if err != nil {
		return policy.Published{}, err
	}
	return shown.Load(engine)
}

func TestMetricsPageGivesTheLoad(t *testing.T) {
	for _, usage := range []string{"kv_cache_usage_perc", "gpu_cache_usage_perc"} {
		p, err := loadOn(fmt.Sprintf(metricsPage, usage, usage, usage), "")
		if err != nil {
			t.Fatal(err)
		}
		if p.Running != 5 || p.Waiting != 7 || p.KVUsage != 0.5 || p.At.IsZero() {
			t.Errorf("%s: %+v", usage, p)
		}
	}
}

// TestMetricsPageIsAskedOnceForAllRanks: a page can be large.
func TestMetricsPageIsAskedOnceForAllRanks(t *testing.T) {
	const name = "kv_cache_usage_perc"
	page := fmt.Sprintf(metricsPage, name, name, name)
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		fmt.Fprint(w, page)
	}))
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	got := map[kv.WorkerKey]policy.Published{}
	ranks := []kv.WorkerKey{{Worker: 3}, {Worker: 3, Rank: 1}}
	c := newClient(t)
	_ = c.pollLoad(ctx, LoadSource{URL: server.URL, Ranks: ranks, Apart: true, Key: noKey}, c.log, func(w kv.WorkerKey, p policy.Published) {
		p.At = time.Time{}
		if got[w] = p; len(got) == len(ranks) {
			cancel()
		}
	})
	testkit.WantEqual(t, "loads", got, map[kv.WorkerKey]policy.Published{ranks[0]: {Running: 3, Waiting: 7, KVUsage: 0.25}, ranks[1]: {Running: 2, KVUsage: 0.5}})
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

// TestAWorkerAtRestIsNotPolled: its page is asked for a few times, and again once its rest
// is over.
func TestAWorkerAtRestIsNotPolled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const idle = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
		var polls []int // seconds
		began := time.Now()
		c := newClient(t)
		c.pages = &http.Client{Transport: roundTrip(func(*http.Request) (*http.Response, error) {
			polls = append(polls, int(time.Since(began).Seconds()))
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(idle))}, nil
		})}
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		rest := func() time.Duration {
			if time.Since(began) < 50*time.Second {
				return 30 * time.Second
			}
			return 0
		}
		_ = c.pollLoad(ctx, LoadSource{URL: "http://w", Ranks: []kv.WorkerKey{{}}, Key: noKey, Rest: rest}, c.log, func(kv.WorkerKey, policy.Published) {})
		if want := []int{0, 1, 2, 3, 4, 34, 52, 55, 58}; !slices.Equal(polls, want) {
			t.Errorf("polled after %v s, want %v", polls, want)
		}
	})
}

// TestCountersComeWithTheLoad: a page is not asked for twice.
func TestCountersComeWithTheLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const idle = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
		began, asked, loads := time.Now(), 0, 0
		var counted []int // seconds
		c := newClient(t)
		c.pages = &http.Client{Transport: roundTrip(func(*http.Request) (*http.Response, error) {
			asked++
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(idle + "vllm:kv_offload_load_bytes_total 7\n"))}, nil
		})}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		counters := &Counters{Transfers: func(_ kv.WorkerKey, transfers policy.Transfers) {
			if counted = append(counted, int(time.Since(began).Seconds())); transfers.HostBytes != 7 {
				t.Errorf("%+v", transfers)
			}
		}}
		_ = c.pollLoad(ctx, LoadSource{URL: "http://w", Ranks: []kv.WorkerKey{{}}, Key: noKey, Counters: counters}, c.log, func(kv.WorkerKey, policy.Published) { loads++ })
		if want := []int{0, 7, 13, 19}; asked != loads || loads != 10 || !slices.Equal(counted, want) {
			t.Errorf("%d pages for %d loads; counters after %v s, want %v", asked, loads, counted, want)
		}
	})
}

func TestPausesEndTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 20 {
			time.Sleep(rand.N(time.Second))
			d := time.Second + rand.N(10*time.Second)
			got := Together(d)
			if got > d || got <= d-time.Second/4 || time.Now().Add(got).UnixNano()%int64(time.Second/4) != 0 {
				t.Errorf("%v for %v at %v", got, d, time.Now())
			}
		}
	})
}

// roundTrip is an http.RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (r roundTrip) RoundTrip(q *http.Request) (*http.Response, error) { return r(q) }

func TestMetricsPageWithoutLoadIsAnError(t *testing.T) {
	for _, page := range []string{"", "go_goroutines 4\n", "vllm:num_requests_running 1\n", "{{{", "{", "{}", "{}\n" + metricsPage, strings.Repeat("x", maxMetricsLine+1)} {
		if p, err := loadOn(page, ""); err == nil {
			t.Errorf("%.40q gave %+v", page, p)
		}
	}
}

// TestImpossibleLoadsDrawNoRequests: NaN drew every request under policy standalone.
func TestImpossibleLoadsDrawNoRequests(t *testing.T) {
	page := func(running, waiting, usage string) string {
		return fmt.Sprintf("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running %s\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting %s\n# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc %s\n", running, waiting, usage)
	}
	for text, most := range map[string]bool{"NaN": true, "+Inf": true, "1e30": true, "-Inf": false, "-1": false, "-1e-9": false, "-1e30": false, "0": false} {
		want := map[bool]policy.Published{true: {Running: kv.MaxTokens, Waiting: kv.MaxTokens, KVUsage: 1}}[most]
		got, err := loadOn(page(text, text, text), "")
		if got.At = (time.Time{}); err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", text, got, err, want)
		}
	}
	for text, want := range map[string]*policy.Published{
		`{"num_waiting_reqs":1,"num_running_reqs":2,"kv_cache_usage":0.5}`:      {Waiting: 1, Running: 2, KVUsage: 0.5},
		`{"num_waiting_reqs":1,"gpu_cache_usage":0.5}`:                          {Waiting: 1, KVUsage: 0.5},
		`{"num_waiting_reqs":9223372036854775807,"kv_cache_usage":1e308}`:       {Waiting: kv.MaxTokens, KVUsage: 1},
		`{"num_waiting_reqs":-1,"num_running_reqs":-2,"kv_cache_usage":-1e308}`: {},
		`{"num_waiting_reqs":1e30,"kv_cache_usage":0.5}`:                        nil,
		`{"num_waiting_reqs":1}`:                                                nil, `{}`: nil, `[]`: nil, `null`: nil, `not JSON`: nil,
	} {
		got, err := readLoad([]byte(text))
		got.At = time.Time{}
		if want == nil && err == nil || want != nil && (err != nil || got != *want) {
			t.Errorf("%s: %+v, %v, want %+v", text, got, err, want)
		}
	}
}

// TestOtherMetricsOfAPageCostNothing: parsing a page of 14 MB took 400 MB.
func TestOtherMetricsOfAPageCostNothing(t *testing.T) {
	const name = "kv_cache_usage_perc"
	page := strings.Repeat("# TYPE other gauge\n# HELP vllm:num_requests_running what\nother{le=\"vllm:num_requests_running\"} 1\n", 1000) + fmt.Sprintf(metricsPage, name, name, name)
	lines, err := linesOf(strings.NewReader(page), loadNames)
	if err != nil || strings.Count(lines.String(), "\n") != 9 {
		t.Errorf("%d lines are kept, %v", strings.Count(lines.String(), "\n"), err)
	}
	if p, err := loadOn(page, "1"); err != nil || p.Running != 2 {
		t.Errorf("%+v, %v", p, err)
	}
	quoted := "# TYPE \"vllm:num_requests_running\" gauge\n{\"vllm:num_requests_running\",engine=\"0\"} 3\n"
	if lines, err := linesOf(strings.NewReader(quoted), loadNames); err != nil || lines.String() != quoted {
		t.Errorf("of names in quotes %q is kept, %v", lines, err)
	}
	long := strings.Repeat("vllm:num_requests_running 1\n", maxMetricsKept/20)
	if _, err := linesOf(strings.NewReader(long), loadNames); err == nil {
		t.Error("a page that tells of nothing else is read whole")
	}
}

func FuzzMetricsPage(f *testing.F) {
	f.Add(fmt.Sprintf(metricsPage, "kv_cache_usage_perc", "kv_cache_usage_perc", "kv_cache_usage_perc"))
	for _, page := range []string{"{", "{}", "{}\n", "{a}", "{\"vllm:num_requests_running\"} 1\n", "vllm:num_requests_running NaN\n", "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running -5\n"} {
		f.Add(page)
	}
	f.Fuzz(func(t *testing.T, page string) {
		for _, engine := range []string{"", "0"} {
			if p, err := loadOn(page, engine); err == nil && !(p.Running >= 0 && p.Waiting >= 0 && p.KVUsage >= 0 && p.KVUsage <= 1) {
				t.Errorf("%+v", p)
			}
		}
	})
}

func FuzzLoadMessage(f *testing.F) {
	for _, text := range []string{
		`{"num_waiting_reqs":1,"num_running_reqs":2,"kv_cache_usage":0.5}`, `{"num_waiting_reqs":-5,"gpu_cache_usage":-1e308}`,
		`{"num_waiting_reqs":9223372036854775807,"kv_cache_usage":1e308}`, `{"num_waiting_reqs":null}`, `[[[[`, ``,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if p, err := readLoad(text); err == nil && !(p.Running >= 0 && p.Waiting >= 0 && p.KVUsage >= 0 && p.KVUsage <= 1 && p.Running <= kv.MaxTokens && p.Waiting <= kv.MaxTokens) {
			t.Errorf("%+v", p)
		}
	})
}

// follow follows a load until the test ends and returns the last load seen.
func follow(t *testing.T, socket, url string) *atomic.Pointer[policy.Published] {
	t.Helper()
	var last atomic.Pointer[policy.Published]
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	c := newClient(t)
	go func() { // ends with ctx
		defer close(done)
		c.FollowLoad(ctx, LoadSource{URL: url, Ranks: []kv.WorkerKey{{}}, Socket: socket, Key: noKey}, c.log, func(_ kv.WorkerKey, p policy.Published) { last.Store(&p) })
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			t.Error("following did not end with its context")
		}
	})
	return &last
}

func TestLoadSocketIsFollowedThroughARestart(t *testing.T) {
	listen := func(address string) *zmq.Publisher {
		p, err := zmq.NewPublisher(address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		return p
	}
	pub := listen("127.0.0.1:0")
	last := follow(t, pub.Endpoint(), "")
	waiting := func(n int) func() bool {
		return func() bool {
			pub.Publish(fmt.Appendf(nil, `{"num_waiting_reqs":%d,"num_running_reqs":1,"kv_cache_usage":0.5}`, n))
			p := last.Load()
			return p != nil && p.Waiting == n && p.Running == 1 && p.KVUsage == 0.5
		}
	}
	testkit.Eventually(t, 20*time.Second, "the first load", waiting(3))
	pub.Close()
	pub = listen(strings.TrimPrefix(pub.Endpoint(), "tcp://"))
	testkit.Eventually(t, 20*time.Second, "a load after the restart", waiting(4))
	pub.Publish([]byte(`not JSON`))
	testkit.Eventually(t, 20*time.Second, "a load after a broken message", waiting(5))
}

func TestWorkersWithoutALoadSocketArePolled(t *testing.T) {
	var fail atomic.Bool
	fail.Store(true)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if fail.Load() {
			http.Error(w, "starting", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, metricsPage, "kv_cache_usage_perc", "kv_cache_usage_perc", "kv_cache_usage_perc")
	}))
	defer server.Close()
	for name, socket := range map[string]string{"none": "", "one where nothing listens": "tcp://127.0.0.1:1"} {
		fail.Store(true)
		last := follow(t, socket, server.URL)
		fail.Store(false)
		testkit.Eventually(t, 20*time.Second, "the load without a socket: "+name, func() bool { p := last.Load(); return p != nil && p.Waiting == 7 })
	}
}

// sizesOn reads the sizes of caches out of a page.
func sizesOn(page string) (map[uint32]int, error) {
	shown, err := ParsePage(strings.NewReader(page))
	return shown.cacheTokens(), err
}

func TestCacheSizesAreReadByRank(t *testing.T) {
	page := "# TYPE vllm:cache_config_info gauge\n" +
		`vllm:cache_config_info{block_size="64",engine="4",num_gpu_blocks="300"} 1` + "\n" +
		`vllm:cache_config_info{block_size="32",effective_attention_block_size="128",engine="5",num_gpu_blocks="300",num_cpu_blocks="7"} 1` + "\n" +
		`vllm:cache_config_info{block_size="64",engine="6",num_gpu_blocks="None"} 1` + "\n"
	sizes, err := sizesOn(page)
	if err != nil || len(sizes) != 2 || sizes[4] != 99*64 || sizes[5] != 99*128 { // 300 are those of three engines together
		t.Errorf("%v %v", sizes, err)
	}
	if sizes, err := sizesOn(""); err != nil || len(sizes) != 0 {
		t.Errorf("empty page: %v %v", sizes, err)
	}
	if _, err := sizesOn("{"); err == nil {
		t.Error("a broken page is read")
	}
}

func TestBlockSizesThatCannotBeAreUnknown(t *testing.T) {
	for size, want := range map[string]int{"1": 1, "64": 64, "65536": 65536, "0": 0, "-1": 0, "65537": 0, "2147483648": 0, "1e3": 0, "": 0, "None": 0} {
		page, err := ParsePage(strings.NewReader("# TYPE vllm:cache_config_info gauge\n" + `vllm:cache_config_info{block_size="` + size + `",engine="0"} 1` + "\n"))
		if got := page.blockSize(); err != nil || got != want {
			t.Errorf("%q: %d, want %d: %v", size, got, want, err)
		}
	}
}

func FuzzParseCacheSizes(f *testing.F) {
	for _, page := range []string{
		`vllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="100"} 1`, "{", "{}",
		`vllm:cache_config_info{block_size="2147483647",engine="2147483647",num_gpu_blocks="2147483647"} 1`,
	} {
		f.Add(page)
	}
	f.Fuzz(func(t *testing.T, page string) {
		sizes, _ := sizesOn(page)
		for rank, tokens := range sizes {
			if tokens <= 0 || tokens > kv.MaxTokens {
				t.Errorf("rank %d has %d tokens", rank, tokens)
			}
		}
	})
}

// TestLoadSocketThatIsTooFastCountsByItsLastMessage: each message takes the router's
// lock.
func TestLoadSocketThatIsTooFastCountsByItsLastMessage(t *testing.T) {
	pub := testkit.NewTestPublisher(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls, last atomic.Int64
	done := make(chan struct{})
	go func() { // ends with ctx
		defer close(done)
		_ = newClient(t).readSocket(ctx, LoadSource{Ranks: []kv.WorkerKey{{}}, Socket: pub.Endpoint()}, nil, func(_ kv.WorkerKey, p policy.Published) {
			calls.Add(1)
			last.Store(int64(p.Waiting))
		})
	}()
	testkit.Eventually(t, 20*time.Second, "subscribed", func() bool { return pub.Subscribers() == 1 })
	const messages = 5000
	began := time.Now()
	for i := range messages {
		pub.Publish(fmt.Appendf(nil, `{"num_waiting_reqs":%d,"kv_cache_usage":0.5}`, i+1))
	}
	testkit.Eventually(t, 20*time.Second, "the last message", func() bool { return last.Load() == messages })
	if n, most := calls.Load(), int64(time.Since(began)/loadLeast)+2; n > most {
		t.Errorf("%d of %d messages counted, want at most %d", n, messages, most)
	}
	cancel()
	<-done
}

func TestAPageThatIsNotThereIsRarelyAskedFor(t *testing.T) {
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.WriteHeader(http.StatusNotImplemented)
	}))
	defer server.Close()
	ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
	defer stop()
	newClient(t).FollowLoad(ctx, LoadSource{URL: server.URL, Ranks: make([]kv.WorkerKey, 1), Key: func() kv.Secret { return "" }}, slog.New(slog.DiscardHandler),
		func(kv.WorkerKey, policy.Published) { t.Error("a load was reported") })
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times in 3 s", n)
	}
}
