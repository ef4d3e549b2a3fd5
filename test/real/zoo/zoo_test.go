package zoo

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"text/tabwriter"

	"kvrouter/internal/base/kv"
)

const (
	requests  = 90
	leastHits = requests / 4 // with fewer, a form shows nothing
	exactGoal = 0.98
)

// result is what came of a form.
type result struct {
	form, version          string
	requests, exact, found int // found: of requests that found anything cached
	over, under            int // tokens promised too much and too few, at most
	note                   string
}

// TestZoo starts a real engine for each form, one after the other, and has it serve prompts
// that branch, return and evict each other. KVROUTER_ZOO is a folder for captures of the
// events and requests, or "run" to keep none. KVROUTER_PYTHON is the Python of another
// vLLM than that of make setup.
func TestZoo(t *testing.T) {
	folder := os.Getenv("KVROUTER_ZOO")
	if folder == "" {
		t.Skip("make test-zoo runs it")
	}
	if folder == "run" {
		folder = ""
	} else if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	var results []result
	for _, f := range forms {
		t.Run(f.name, func(t *testing.T) {
			r := result{form: f.name}
			defer func() { results = append(results, r) }()
			if f.off != "" {
				r.note = f.off
				t.Skip(f.off)
			}
			if f.engine == kv.EngineSGLang && os.Getenv("KVROUTER_PYTHON") != "" {
				r.note = "KVROUTER_PYTHON is a vLLM's"
				t.Skip(r.note)
			}
			serve(t, f, &r, folder)
			if r.note != f.note {
				t.Errorf("predictions is %q in GET /workers, want %q", r.note, f.note)
			}
			if goal := exactGoal * float64(r.requests); float64(r.exact) < goal {
				t.Errorf("%d of %d predictions were exact, want %.0f at least", r.exact, r.requests, goal)
			}
			if r.found < leastHits {
				t.Errorf("%d of %d requests found anything cached: the form shows nothing", r.found, r.requests)
			}
		})
	}
	t.Log("\n" + tableOf(results))
}

func tableOf(results []result) string {
	var text strings.Builder
	out := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "form\tengine\texact\tfound cached\tmost too many\ttoo few\t")
	for _, r := range results {
		if r.requests == 0 {
			fmt.Fprintf(out, "%s\t%s\tnot run\t\t\t\t%s\n", r.form, r.version, cmp.Or(r.note, "it failed"))
			continue
		}
		fmt.Fprintf(out, "%s\t%s\t%d of %d\t%d\t%d\t%d\t%s\n", r.form, r.version, r.exact, r.requests, r.found, r.over, r.under, r.note)
	}
	out.Flush()
	return text.String()
}

// serve has one worker of the form serve all requests.
func serve(t *testing.T, f form, r *result, folder string) {
	s := start(t, f)
	version, ports := about(t, s, f)
	r.version = version
	applied := func(rank uint32) int {
		return int(s.Metrics()[fmt.Sprintf(`kvrouter_kv_events_total{dp_rank="%d",kind="batches",worker_id="0"}`, rank)])
	}
	l := listen(t, ports)
	l.settled(t, applied)
	c := &conversations{form: f, random: rand.New(rand.NewPCG(3, 3))}
	for range 4 {
		c.systems = append(c.systems, c.text(f.prompt.system/2, f.prompt.system))
	}
	for range requests {
		one := c.next()
		a := ask(t, s, f, one, 4+c.random.IntN(40))
		r.requests++
		if a.cached > 0 {
			r.found++
		}
		if a.predicted == a.cached {
			r.exact++
		} else {
			t.Logf("request %d of %d tokens: %d predicted, %d found", r.requests, len(one.tokens), a.predicted, a.cached)
		}
		r.over, r.under = max(r.over, a.predicted-a.cached), max(r.under, a.cached-a.predicted)
		l.settled(t, applied)
		l.request(one, a.cached)
		one.tokens = append(one.tokens, a.output...)
	}
	record := s.Workers()[0]
	r.note = record.Predictions
	switch exact := record.Exact; {
	case exact == nil:
		t.Error("no exact_predictions in GET /workers")
	case r.exact == r.requests && *exact < 1:
		t.Errorf("exact_predictions is %v in GET /workers", *exact)
	}
	if folder != "" {
		l.write(t, folder, strings.ToLower(strings.ReplaceAll(r.version, " ", "-"))+"-"+strings.TrimPrefix(f.name, "sglang-"))
	}
}

// conversation is the tokens of a prompt that later ones continue.
type conversation struct {
	tokens  []uint32
	adapter string // empty: the base model
}

// conversations are the prompts of a form. They share system prompts, continue, branch
// and return.
type conversations struct {
	form    form
	random  *rand.Rand
	systems [][]uint32
	all     []*conversation
}

// text returns from least to most tokens: of few kinds, for small captures.
func (c *conversations) text(least, most int) []uint32 {
	tokens := make([]uint32, least+c.random.IntN(most-least+1))
	for i := range tokens {
		tokens[i] = 1000 + c.random.Uint32N(64)
	}
	return tokens
}

// adapter returns one of the form's adapters, or none.
func (c *conversations) adapter() string {
	if i := c.random.IntN(len(c.form.adapters) + 1); i > 0 {
		return c.form.adapters[i-1]
	}
	return ""
}

// next returns the conversation of the next request, with the prompt to send.
func (c *conversations) next() *conversation {
	const kept = 10
	one := &conversation{adapter: c.adapter()}
	switch p := c.random.Float64(); {
	case len(c.all) > 0 && p < 0.45: // continues
		one = c.all[c.random.IntN(len(c.all))]
	case len(c.all) > 0 && p < 0.65: // branches off
		from := c.all[c.random.IntN(len(c.all))]
		one.tokens = append(one.tokens, from.tokens[:1+c.random.IntN(len(from.tokens))]...)
		c.all = append(c.all, one)
	default:
		one.tokens = append(one.tokens, c.systems[c.random.IntN(len(c.systems))]...)
		c.all = append(c.all, one)
	}
	if len(c.all) > kept {
		c.all = c.all[1:]
	}
	most := c.form.prompt.most
	one.tokens = append(one.tokens[:min(len(one.tokens), most-c.form.prompt.turn)], c.text(5, c.form.prompt.turn)...)
	return one
}
