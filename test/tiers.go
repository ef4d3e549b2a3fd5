package test

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
)

// TierSite is a router whose workers have lower tiers.
type TierSite struct {
	*Router
	random *rand.Rand
	asked  int           // requests
	Talks  [][]uint32    // open conversations
	Quiet  time.Duration // without KV events, after which none of an answer is to come
}

// Found is what one request found cached.
type Found struct {
	Worker, Prompt    int
	Predicted, Cached int // tokens
	Text              string
}

// Tokens returns that many random ones.
func (s *TierSite) Tokens(n int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = 1000 + s.random.Uint32N(40000)
	}
	return list
}

// Next returns a prompt: a conversation continues, branches off, or begins.
func (s *TierSite) Next() []uint32 {
	const kept, most = 14, 1100
	turn := s.Tokens(20 + s.random.IntN(100))
	p := s.random.Float64()
	if len(s.Talks) < kept/2 || p < 0.1 {
		if s.Talks = append(s.Talks, append(s.Tokens(200+s.random.IntN(500)), turn...)); len(s.Talks) > kept {
			s.Talks = s.Talks[1:]
		}
		return s.Talks[len(s.Talks)-1]
	}
	talk := &s.Talks[s.random.IntN(len(s.Talks))]
	from := *talk
	if p < 0.3 {
		from = from[:1+s.random.IntN(len(from))]
	}
	next := append(append([]uint32{}, from[:min(len(from), most)]...), turn...)
	if p >= 0.3 {
		*talk = next
	}
	return next
}

// Ask sends a prompt and waits until the events of its blocks are applied.
func (s *TierSite) Ask(prompt []uint32) Found { return s.ask(prompt, nil) }

// AskOf is Ask for one worker.
func (s *TierSite) AskOf(worker uint64, prompt []uint32) Found {
	return s.ask(prompt, http.Header{hints.HeaderPinnedWorker: {strconv.FormatUint(worker, 10)}})
}

// ask sends a prompt with those headers.
func (s *TierSite) ask(prompt []uint32, header http.Header) (f Found) {
	s.T.Helper()
	text, err := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": 2, "ignore_eos": true, "temperature": 0})
	if err != nil {
		s.T.Fatal(err)
	}
	request, err := http.NewRequest(http.MethodPost, s.OpenAI+"/v1/completions", strings.NewReader(string(text)))
	if err != nil {
		s.T.Fatal(err)
	}
	for name, values := range header {
		request.Header[name] = values
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		s.T.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		s.T.Fatalf("%s: %v: %.500s", response.Status, err, answer)
	}
	s.asked++
	f.Prompt, f.Text = len(prompt), gjson.GetBytes(answer, "choices.0.text").Str
	f.Worker, _ = strconv.Atoi(response.Header.Get(web.HeaderWorker))
	if f.Predicted, err = strconv.Atoi(response.Header.Get(web.HeaderOverlap)); err != nil {
		s.T.Fatalf("%s: %v", web.HeaderOverlap, err)
	}
	f.Cached = int(gjson.GetBytes(answer, "usage.prompt_tokens_details.cached_tokens").Int())
	s.Calm()
	return f
}

// Doubtful returns the workers whose lower tiers may have been emptied without an event.
func (s *TierSite) Doubtful() (workers []int) {
	for _, w := range s.Workers() {
		if w.LowerTiers != nil && w.LowerTiers.Doubtful {
			workers = append(workers, int(w.WorkerID))
		}
	}
	return workers
}

// Calm waits until no KV event has come for Quiet.
func (s *TierSite) Calm() {
	s.T.Helper()
	s.Router.Calm(s.Quiet)
}

// Source is the tokens that all workers found cached in a tier, by their own count.
func (s *TierSite) Source(name string) (sum float64) {
	for _, w := range s.Workers() {
		sum += sumOf(s.Get(*w.Endpoint+"/metrics"), sources, name)
	}
	return sum
}

// predicted is the tokens that the router has predicted for a tier.
func (s *TierSite) predicted(tier string) float64 {
	return sumOf(s.Get(s.OpenAI+"/metrics"), predictions, tier)
}

// sources are the lines of engines about the tiers that cached tokens came from, and
// predictions those of the router about the tiers that it predicted them for.
var (
	sources     = regexp.MustCompile(`^(vllm:prompt_tokens_cached_by_source_total|sglang:cached_tokens_total)\{`)
	predictions = regexp.MustCompile(`^kvrouter_predicted_tokens_total\{`)
)

// sumOf adds up the values of the lines of a page that match and have the value of a
// label.
func sumOf(page []byte, match *regexp.Regexp, value string) (sum float64) {
	for line := range strings.SplitSeq(string(page), "\n") {
		if match.MatchString(line) && strings.Contains(line, fmt.Sprintf("%q", value)) {
			n, _ := strconv.ParseFloat(line[strings.LastIndex(line, " ")+1:], 64)
			sum += n
		}
	}
	return sum
}

// Load sends so many prompts, one at a time, and demands that nearly all predictions are
// exact, apart from those of files.
func (s *TierSite) Load(requests int, what string, files bool) {
	s.T.Helper()
	const goal = 0.98
	exact, all, predicted := 0, 0, 0
	shown := map[int]int{} // requests by worker that have shown what doubtful tiers had
	testkit.Eventually(s.T, 20*time.Second, what+": the router has counted all requests before", func() bool {
		return int(SumOf(s.Get(s.OpenAI+"/metrics"), "kvrouter_requests_total")) >= s.asked
	})
	before := map[string]float64{}
	for _, name := range []string{"device", "host", "disk", "storage"} {
		before[name] = s.Source(name)
	}
	device, host := s.predicted("device"), s.predicted("host")
	for i := range requests {
		doubtful := s.Doubtful()
		f := s.Ask(s.Next())
		all, predicted = all+f.Cached, predicted+f.Predicted
		switch less := f.Predicted < f.Cached; {
		case f.Predicted == f.Cached || files && less:
			exact++
		case less && slices.Contains(doubtful, f.Worker) && shown[f.Worker] == 0:
			shown[f.Worker]++
		default:
			s.T.Logf("%s, request %d of %d tokens at worker %d: predicted %d, cached %d", what, i, f.Prompt, f.Worker, f.Predicted, f.Cached)
		}
	}
	if float64(exact+len(shown)) < goal*float64(requests) {
		s.T.Errorf("%s: %d of %d predictions were exact, and %d showed what doubtful tiers had", what, exact, requests, len(shown))
	}
	// An engine counts with its next step.
	came := map[string]float64{}
	testkit.Eventually(s.T, 20*time.Second, what+": the engines' counts of cached tokens equal their answers'", func() bool {
		sum := 0.0
		for name, was := range before {
			came[name] = s.Source(name) - was
			sum += came[name]
		}
		return int(sum) == all
	})
	// Where all are exact, they are in each tier. The router counts a request at its end.
	if exact == requests && !files {
		testkit.Eventually(s.T, 20*time.Second, fmt.Sprintf("%s: predictions by tier equal the engines' counts: %v", what, came), func() bool {
			return s.predicted("device")-device == came["device"] && s.predicted("host")-host == came["host"]
		})
	}
	s.T.Logf("%s: %d of %d exact, %d showed what doubtful tiers had; %d of %d tokens predicted; %v", what, exact, requests, len(shown),
		predicted, all, came)
}

// Loaded checks that requests were loaded from a tier.
func (s *TierSite) Loaded(name string) {
	s.T.Helper()
	if s.Source(name) == 0 {
		s.T.Errorf("no request was loaded from %s: the test shows nothing", name)
	}
}

// NewTierSite returns a site without conversations.
func NewTierSite(r *Router) *TierSite {
	return &TierSite{Router: r, random: rand.New(rand.NewPCG(11, 11)), Quiet: 300 * time.Millisecond}
}

// Post posts a body to a worker, which must succeed.
func (s *TierSite) Post(url, body string) {
	s.T.Helper()
	response, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		s.T.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		s.T.Fatalf("POST %s: %s", url, response.Status)
	}
}
