package zoo

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
	"kvrouter/test"
)

const (
	requests  = 80
	leastHits = requests / 4 // with fewer, a form shows nothing
	exactGoal = 0.98
)

// result is what came of a form.
type result struct {
	form, version          string
	requests, exact, found int // found: of requests that found anything cached
	over                   int // tokens promised too much, at most
	note                   string
}

// TestZoo starts a real vLLM for each form, one after the other, and has it serve prompts
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
			serve(t, f, &r, folder)
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
	fmt.Fprintln(out, "form\tengine\texact\tfound cached\tmost too many\t")
	for _, r := range results {
		if r.requests == 0 {
			fmt.Fprintf(out, "%s\t%s\tnot run\t\t\t%s\n", r.form, cmp.Or(r.version, "vLLM"), cmp.Or(r.note, "it failed"))
			continue
		}
		fmt.Fprintf(out, "%s\t%s\t%d of %d\t%d\t%d\t\n", r.form, r.version, r.exact, r.requests, r.found, r.over)
	}
	out.Flush()
	return text.String()
}

// modelFolder writes a model of a form, which has the tokenizer of the test model.
func modelFolder(t *testing.T, config string) string {
	t.Helper()
	folder := t.TempDir()
	text, err := os.ReadFile(filepath.Join("test/real/zoo/testdata", config+".json"))
	if err != nil {
		t.Fatal(err)
	}
	testkit.WriteFile(t, filepath.Join(folder, "config.json"), string(text))
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} {
		if err := os.Symlink(filepath.Join(test.ModelFolder(), name), filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// serve has one worker of the form serve all requests.
func serve(t *testing.T, f form, r *result, folder string) {
	args := []string{
		"--model=" + modelFolder(t, cmp.Or(f.config, f.name)), "--block-size=32",
		"--", "--load-format", "dummy", "--max-model-len", strconv.Itoa(cmp.Or(f.length, 2048)), "--num-gpu-blocks-override", strconv.Itoa(f.cache),
	}
	if f.draft != "" {
		args = append(args, "--speculative-config", fmt.Sprintf(`{"method":"eagle","model":%q,"num_speculative_tokens":2}`, modelFolder(t, f.draft)))
	}
	s := test.StartEngines(t, 1, f.env, append(args, f.args...)...)
	worker := *s.Workers()[0].Endpoint
	r.version = "vLLM " + gjson.GetBytes(s.Get(worker+"/version"), "version").Str
	l := listen(t, s.Get(worker+"/kv_event_sources"))
	c := &conversations{form: f, random: rand.New(rand.NewPCG(3, 3))}
	for range 4 {
		c.systems = append(c.systems, c.text(f.prompt.system/2, f.prompt.system))
	}
	for range requests {
		one := c.next()
		predicted, cached, output := ask(t, s, one.tokens, 4+c.random.IntN(40))
		r.requests++
		if cached > 0 {
			r.found++
		}
		if predicted == cached {
			r.exact++
		} else {
			t.Logf("request %d of %d tokens: %d predicted, %d found", r.requests, len(one.tokens), predicted, cached)
		}
		r.over = max(r.over, predicted-cached)
		l.settled(t, func(rank uint32) int {
			return int(s.Metrics()[fmt.Sprintf(`kvrouter_kv_events_total{dp_rank="%d",kind="batches",worker_id="0"}`, rank)])
		})
		l.request(one.tokens, cached)
		one.tokens = append(one.tokens, output...)
	}
	if folder != "" {
		l.write(t, folder, strings.ToLower(strings.ReplaceAll(r.version, " ", "-"))+"-"+f.name)
	}
}

// conversation is the tokens of a prompt that later ones continue.
type conversation struct{ tokens []uint32 }

// conversations are the prompts of a form. They share system prompts, go on, branch
// and return.
type conversations struct {
	form    form
	random  *rand.Rand
	systems [][]uint32
	all     []*conversation
}

// text returns from least to most tokens.
func (c *conversations) text(least, most int) []uint32 {
	tokens := make([]uint32, least+c.random.IntN(most-least+1))
	for i := range tokens {
		tokens[i] = 1000 + c.random.Uint32N(40000)
	}
	return tokens
}

// next returns the conversation of the next request, with the prompt to send.
func (c *conversations) next() *conversation {
	const kept = 10
	one := new(conversation)
	switch p := c.random.Float64(); {
	case len(c.all) > 0 && p < 0.45: // goes on
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

// ask sends a prompt and returns the prediction for it, what the engine found, and the
// answer.
func ask(t *testing.T, s *test.Router, prompt []uint32, tokens int) (predicted, cached int, output []uint32) {
	t.Helper()
	// Some forms cannot be sampled with a seed on a CPU, and the weights are made up anyway.
	text, err := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "return_token_ids": true, "temperature": 0})
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.Post(s.OpenAI+"/v1/completions", "application/json", bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v: %.500s", response.Status, err, answer)
	}
	predicted, err = strconv.Atoi(response.Header.Get(web.HeaderOverlap))
	if err != nil {
		t.Fatalf("%s: %v", web.HeaderOverlap, err)
	}
	for _, token := range gjson.GetBytes(answer, "choices.0.token_ids").Array() {
		output = append(output, uint32(token.Uint()))
	}
	if len(output) == 0 {
		t.Fatalf("no token_ids: %.300s", answer)
	}
	return predicted, int(gjson.GetBytes(answer, "usage.prompt_tokens_details.cached_tokens").Int()), output
}
