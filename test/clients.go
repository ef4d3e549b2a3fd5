package test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"kvrouter/internal/decide/policies"
	"kvrouter/internal/testkit"
)

// Keys of the two clients before a router, and the text by which the workers know the
// requests of the one that poisons.
const (
	goodKey = "key-of-good"
	badKey  = "key-of-bad"
	badText = "poison"
)

const (
	goodClients, badClientsAtOnce = 8, 2
	// goodTakes is what a well worker takes for an answer.
	goodTakes = 60 * time.Millisecond
	// badPause is the time between two requests of the client that poisons, and badPatience
	// the time that it waits for an answer.
	badPause, badPatience = 40 * time.Millisecond, 4 * time.Second
	// goodLeast and goodLeastBehind are the fewest requests of the sound client, without and
	// behind a gateway: on a busy machine a case waits for them, up to poisonLimit.
	goodLeast, goodLeastBehind = 150, 600
	poisonLimit                = 40 * time.Second
	// poisonsAtATime is how many routers meet poison at a time.
	poisonsAtATime = 5
)

// poison is a way in which the requests of a client fail at every worker.
type poison struct {
	name  string
	serve http.HandlerFunc
	fails bool // it discredits the client
	cuts  bool // but not behind a gateway: it reports an answer cut by its worker like a client that disconnects
}

var poisons = []poison{
	{"500", answersAt(500), true, false},
	{"503", plainly(503), true, false},
	{"503, Retry-After", answersAt(503), true, false},
	{"429", plainly(429), true, false},
	{"429, Retry-After", answersAt(429), true, false},
	{"reset", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, true, false},
	{"cut stream", breaksOff, true, true},
	{"cut answer", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		io.WriteString(w, `{"choices":[`)
		panic(http.ErrAbortHandler)
	}, true, true},
	{"hung", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, false, false},
	{"slow", func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(3 * time.Second):
			testkit.StreamOf(testkit.TokenEvent, "[DONE]")(w, r)
		case <-r.Context().Done():
		}
	}, false, false},
}

// answersAt answers at once with a status.
func answersAt(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
			w.Header().Set("Retry-After", "5")
		}
		plainly(status)(w, r)
	}
}

// plainly is answersAt without Retry-After.
func plainly(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		io.WriteString(w, `{"error":{"message":"no"}}`)
	}
}

// breaksOff ends a stream after its first event.
func breaksOff(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	io.WriteString(w, "data: "+testkit.TokenEvent+"\n\n")
	w.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

// PoisonCase is a client whose requests fail at each of four workers, beside another
// client.
type PoisonCase struct {
	Policy string
	poison
	Ill int // workers that answer nothing but 500
}

// PoisonCases returns every policy with every poison, without and with an ill worker; or
// a sample in which each poison is met once.
func PoisonCases(all bool) (cases []PoisonCase) {
	for k, kind := range poisons {
		for p, policy := range policies.Names {
			for ill := range 2 {
				if all || p == k%len(policies.Names) && ill == k%2 {
					cases = append(cases, PoisonCase{policy, kind, ill})
				}
			}
		}
	}
	return cases
}

// Front starts a gateway at port, and uses the port after it, too. Its picker and the
// workers are given as host:port. It returns the gateway's URL once it uses the picker.
type Front func(t *testing.T, port int, picker string, workers []string) (url string)

// RunPoisons runs cases for so long each, and prints what the client loses whose requests
// are sound: of each policy with each poison. Without a front, clients ask the router.
func RunPoisons(t *testing.T, program func() (string, error), cases []PoisonCase, lasts time.Duration, front Front) {
	shares := make([]float64, len(cases))
	together(t, len(cases), poisonsAtATime, func(i int) (string, func(t *testing.T, port int)) {
		c := cases[i]
		return fmt.Sprintf("%s/%s/%d ill", c.name, c.Policy, c.Ill),
			func(t *testing.T, port int) { shares[i] = c.run(t, program, port, lasts, front) }
	})
	for ill := range 2 {
		var text strings.Builder
		table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
		fmt.Fprint(table, "poison")
		var shown []string // policies
		for _, policy := range policies.Names {
			if slices.ContainsFunc(cases, func(c PoisonCase) bool { return c.Policy == policy && c.Ill == ill }) {
				shown = append(shown, policy)
				fmt.Fprint(table, "\t", policy)
			}
		}
		for _, kind := range poisons {
			fmt.Fprint(table, "\n", kind.name)
			for _, policy := range shown {
				cell := ""
				if at := slices.IndexFunc(cases, func(c PoisonCase) bool {
					return c.Policy == policy && c.Ill == ill &&
						c.name == kind.name
				}); at >= 0 {
					cell = fmt.Sprintf("%.2f", 100*shares[at])
				}
				fmt.Fprint(table, "\t", cell)
			}
		}
		table.Flush()
		t.Logf("%d of 4 workers ill; requests of the sound client that are lost, %%\n%s\n", ill, &text)
	}
}

// run runs a case, and returns the share of the sound client's requests that were lost.
func (c *PoisonCase) run(t *testing.T, program func() (string, error), port int, lasts time.Duration, front Front) (share float64) {
	var attempts atomic.Int64 // of the client that poisons
	keys := filepath.Join(t.TempDir(), "keys.yaml")
	if err := os.WriteFile(keys, []byte("- {name: good, key: "+goodKey+"}\n- {name: bad, key: "+badKey+"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--engine=none", "--log-level=info", "--policy=" + c.Policy, "--api-keys-file=" + keys}
	var workers []string
	for i := range 4 {
		worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			bad := strings.Contains(string(body), badText)
			if bad {
				attempts.Add(1)
			}
			switch {
			case i < c.Ill:
				plainly(500)(w, r)
			case bad:
				c.serve(w, r)
			default:
				select {
				case <-time.After(goodTakes):
					testkit.StreamOf(testkit.TokenEvent, "[DONE]")(w, r)
				case <-r.Context().Done():
				}
			}
		})
		workers = append(workers, worker.Listener.Addr().String())
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", worker.URL, i))
	}
	if front != nil {
		args = append(args, fmt.Sprintf("--ext-proc-port=%d", port+2))
	}
	router := StartAt(t, program, port, nil, args...)
	router.WaitReady(len(workers), readyLimit)
	url := router.OpenAI
	if front != nil {
		url = front(t, port+3, fmt.Sprintf("127.0.0.1:%d", port+2), workers)
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: goodClients + badClientsAtOnce}}
	defer client.CloseIdleConnections()
	var all sync.WaitGroup
	var good, lost, bad atomic.Int64
	least := int64(goodLeast)
	if front != nil { // the ill worker costs some requests until it is known
		least = goodLeastBehind
	}
	began := time.Now()
	more := func() bool {
		elapsed := time.Since(began)
		return elapsed < lasts || elapsed < poisonLimit && good.Load() < least
	}
	for range goodClients {
		all.Go(func() {
			for more() {
				if good.Add(1); !chatAs(t.Context(), client, url, goodKey, "hello", readyLimit) {
					lost.Add(1)
				}
			}
		})
	}
	for range badClientsAtOnce {
		all.Go(func() {
			for more() {
				bad.Add(1)
				chatAs(t.Context(), client, url, badKey, badText, badPatience)
				<-time.After(badPause)
			}
		})
	}
	all.Wait()
	metrics := router.Metrics()
	out := 0.0
	for i := c.Ill; i < len(workers); i++ {
		labels := fmt.Sprintf(`{dp_rank="0",worker_id="%d"}`, i)
		out += metrics["kvrouter_worker_ejected"+labels] + metrics["kvrouter_worker_held"+labels]
	}
	requests, each := float64(bad.Load()), float64(attempts.Load())/float64(bad.Load())
	share = float64(lost.Load()) / float64(good.Load())
	t.Logf("%d of %d requests are lost; of the other client %.0f, %.2f attempts each; %v well workers are out in the end", lost.Load(),
		good.Load(), requests, each, out)
	if share > 0.01 || good.Load() < least {
		t.Errorf("%d of %d requests of the sound client are lost, want at most 1 %% of at least %d", lost.Load(), good.Load(), least)
	}
	// Beside its share of the budget, retries whose worker was ejected meanwhile are free.
	if most := 1.4 + 15/requests; each > most && requests > 30 {
		t.Errorf("%.2f attempts at each of %.0f requests that fail everywhere, want at most %.2f", each, requests, most)
	}
	if out > 0 {
		t.Errorf("%v workers that are well are out in the end", out)
	}
	if c.fails && (front == nil || !c.cuts) && metrics["kvrouter_discredited_clients"] != 1 {
		t.Error("the client whose requests fail everywhere is not discredited")
	}
	return share
}

// chatAs sends a chat with a key, and reports whether it got a whole answer within limit.
func chatAs(ctx context.Context, client *http.Client, url, key, text string, limit time.Duration) bool {
	ctx, leave := context.WithTimeout(ctx, limit)
	defer leave()
	body := fmt.Sprintf(`{"model":"m","stream":true,"messages":[{"role":"user","content":%q}]}`, text)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		return false
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+key)
	response, err := client.Do(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	a, err := ReadAnswer(response.Header, response.Body, true)
	return err == nil && response.StatusCode == http.StatusOK && a.Finished && !a.Broken
}
