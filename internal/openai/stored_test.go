package openai

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"
)

// storing is a worker that keeps its responses, as vLLM and SGLang do.
type storing struct {
	mu    sync.Mutex
	name  string
	has   map[string]bool
	asked int // for a response by its id
}

func (s *storing) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, named := strings.CutPrefix(r.URL.Path, proxy.ResponsesRoute+"/"); named {
		s.asked++
		if !s.has[id] {
			http.NotFound(w, r)
			return
		}
		if r.Method == http.MethodDelete {
			delete(s.has, id)
		}
		fmt.Fprintf(w, `{"id":%q,"object":"response"}`, id)
		return
	}
	raw, _ := io.ReadAll(r.Body)
	body := gjson.ParseBytes(raw)
	if previous := body.Get("previous_response_id").Str; previous != "" && !s.has[previous] {
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `{"error":{"message":"no such response","code":404}}`)
		return
	}
	id := fmt.Sprintf("resp_%s_%d", s.name, len(s.has))
	s.has[id] = true
	answer := fmt.Sprintf(`{"id":%q,"object":"response","status":"completed","usage":{"input_tokens":9,"output_tokens":2}}`, id)
	if !body.Get("stream").Bool() {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, answer)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "event: response.created\ndata: {\"type\":\"response.created\",\"response\":%s}\n\n", answer)
	fmt.Fprintf(w, "event: response.output_text.delta\ndata: {\"delta\":\"x\"}\n\n")
	fmt.Fprintf(w, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":%s}\n\n", answer)
}

// TestAStoredResponseIsContinuedWhereItIs holds conversations of five turns over four
// workers, half of them streamed: through one router, and through another that has not
// seen them begin.
func TestAStoredResponseIsContinuedWhereItIs(t *testing.T) {
	var workers []*storing
	var urls []string
	for i := range 4 {
		s := &storing{name: string(rune('a' + i)), has: map[string]bool{}}
		workers, urls = append(workers, s), append(urls, testkit.NewFakeWorker(t, s.serve).URL)
	}
	apis := []*testAPI{newTestAPI(t, setup{}, urls...), newTestAPI(t, setup{}, urls...)}
	conversations, used := 200, map[string]bool{}
	if testing.Short() {
		conversations = 20
	}
	for n := range conversations {
		previous := ""
		for turn := range 5 {
			api := apis[0]
			if n%10 == 0 && turn == 3 {
				api = apis[1]
			}
			options := ""
			if previous != "" {
				options += fmt.Sprintf(`,"previous_response_id":%q`, previous)
			}
			if n%2 == 0 {
				options += `,"stream":true`
			}
			response, text := api.post(t, proxy.ResponsesRoute, `{"model":"m","input":"hi"`+options+`}`)
			if response.StatusCode != http.StatusOK {
				t.Fatalf("conversation %d, turn %d after %q: %d %s", n, turn, previous, response.StatusCode, text)
			}
			_, after, _ := strings.Cut(text, `"id":"`)
			id, _, _ := strings.Cut(after, `"`)
			if turn > 0 && id[:6] != previous[:6] {
				t.Fatalf("%s continues %s", id, previous)
			}
			previous = id
			used[id[:6]] = true
		}
	}
	asked := 0
	for _, s := range workers {
		asked += s.asked
	}
	if len(used) != 4 || asked > 4*2*conversations/10 {
		t.Errorf("workers used: %v, asked for responses %d times", used, asked)
	}
	for _, c := range []struct {
		method string
		status int
	}{{http.MethodGet, 200}, {http.MethodDelete, 200}, {http.MethodGet, 404}} {
		request, _ := http.NewRequestWithContext(t.Context(), c.method, apis[1].URL+proxy.ResponsesRoute+"/resp_a_1", nil)
		response, err := http.DefaultClient.Do(request)
		if err != nil || response.StatusCode != c.status {
			t.Errorf("%s: %v %v", c.method, response, err)
		}
		response.Body.Close()
	}
	searches := func() (n int) {
		for _, s := range workers {
			s.mu.Lock()
			n += s.asked
			s.mu.Unlock()
		}
		return n
	}
	before := searches()
	for id, asked := range map[string]int{"resp_x": 4, strings.Repeat("x", maxResponseID+1): 0} {
		if response, text := apis[0].post(t, proxy.ResponsesRoute, fmt.Sprintf(`{"model":"m","input":"hi","previous_response_id":%q}`, id)); response.StatusCode != http.StatusNotFound {
			t.Errorf("%.20s: %d %s", id, response.StatusCode, text)
		}
		if n := searches() - before; n != asked {
			t.Errorf("%.20s: %d workers were asked, want %d", id, n, asked)
		}
		before = searches()
	}
	_, text := apis[0].post(t, proxy.ResponsesRoute, `{"model":"m","input":"hi","store":false}`)
	apis[0].post(t, proxy.ResponsesRoute, fmt.Sprintf(`{"model":"m","input":"hi","previous_response_id":%q}`, gjson.Get(text, "id").Str))
	if searches() == before {
		t.Error("a response that no worker stores is remembered")
	}
}

// TestStoredResponsesAreBounded holds that the oldest go first.
func TestStoredResponsesAreBounded(t *testing.T) {
	var s Stored
	for i := range 2*maxStored + 1 {
		s.Note(fmt.Sprint(i), uint64(i))
	}
	for _, again := range []struct {
		id     string
		worker uint64
		news   bool
	}{{strings.Repeat("x", maxResponseID+1), 1, false}, {"", 1, false}, {fmt.Sprint(2 * maxStored), 2 * maxStored, false}, {fmt.Sprint(2 * maxStored), 7, true}} {
		if news := s.Note(again.id, again.worker); news != again.news {
			t.Errorf("%.20q at %d: news %v", again.id, again.worker, news)
		}
	}
	if _, known := s.of(fmt.Sprint(maxStored)); known || len(s.worker) != maxStored || len(s.ring) != maxStored {
		t.Errorf("%d are known, %d in order", len(s.worker), len(s.ring))
	}
	if worker, known := s.of(fmt.Sprint(2 * maxStored)); !known || worker != 7 {
		t.Errorf("the last: %d, %v", worker, known)
	}
}
