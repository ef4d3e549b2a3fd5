package openai

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// storing is a worker that keeps its responses, as vLLM and SGLang do.
type storing struct {
	mu    sync.Mutex
	name  string
	has   map[string]bool
	asked map[string]int // by the id of a response: requests for it
}

// searches counts the requests for a response; empty: for all. A search ends with the first worker that
// has it: others may still be asked then.
func (s *storing) searches(id string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for of, asked := range s.asked {
		if id == "" || of == id {
			n += asked
		}
	}
	return n
}

func (s *storing) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, named := strings.CutPrefix(r.URL.Path, proxy.ResponsesRoute+"/"); named {
		s.asked[id]++
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
		s := &storing{name: string(rune('a' + i)), has: map[string]bool{}, asked: map[string]int{}}
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
	searches := func(id string) (n int) {
		for _, s := range workers {
			n += s.searches(id)
		}
		return n
	}
	asked := searches("")
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
	for id, asked := range map[string]int{"resp_x": 4, strings.Repeat("x", maxResponseID+1): 0} {
		if response, text := apis[0].post(t, proxy.ResponsesRoute, fmt.Sprintf(`{"model":"m","input":"hi","previous_response_id":%q}`, id)); response.StatusCode != http.StatusNotFound {
			t.Errorf("%.20s: %d %s", id, response.StatusCode, text)
		}
		if n := searches(id); n != asked {
			t.Errorf("%.20s: %d workers were asked, want %d", id, n, asked)
		}
	}
	_, text := apis[0].post(t, proxy.ResponsesRoute, `{"model":"m","input":"hi","store":false}`)
	id := gjson.Get(text, "id").Str
	apis[0].post(t, proxy.ResponsesRoute, fmt.Sprintf(`{"model":"m","input":"hi","previous_response_id":%q}`, id))
	if searches(id) == 0 {
		t.Error("a response that no worker stores is remembered")
	}
}

// TestStoredResponsesAreBounded holds that the oldest go first, and that an owner drops only its
// own where it has more than its share.
func TestStoredResponsesAreBounded(t *testing.T) {
	var s Stored
	s.Note("of another", 3, 9)
	for i := range 2*maxStored + 1 {
		s.Note(fmt.Sprint(i), uint64(i), 1)
	}
	for _, again := range []struct {
		id     string
		worker uint64
		owner  keys.Owner
		news   bool
	}{
		{strings.Repeat("x", maxResponseID+1), 1, 1, false}, {"", 1, 1, false}, {fmt.Sprint(2 * maxStored), 2 * maxStored, 1, false}, {fmt.Sprint(2 * maxStored), 7, 1, true},
		{fmt.Sprint(2 * maxStored), 8, 9, false}, {fmt.Sprint(2 * maxStored), 8, 0, false},
	} {
		if news := s.Note(again.id, again.worker, again.owner); news != again.news {
			t.Errorf("%.20q at %d: news %v", again.id, again.worker, news)
		}
	}
	if _, known := s.of(fmt.Sprint(maxStored)); known || len(s.byID) != maxStored || s.owners[1].Len() != maxStored-1 {
		t.Errorf("%d are known, %d in order", len(s.byID), s.owners[1].Len())
	}
	for id, want := range map[string]storedResponse{fmt.Sprint(2 * maxStored): {7, 1}, "of another": {3, 9}} {
		if got, known := s.of(id); !known || got != want {
			t.Errorf("%s: %v, %v", id, got, known)
		}
	}
	for i := range maxStored {
		s.Note(fmt.Sprint("new", i), 1, 9)
	}
	if len(s.byID) != maxStored || s.owners[1].Len() != maxStored/2 || s.owners[9].Len() != maxStored/2 {
		t.Errorf("two owners have %d and %d of %d", s.owners[1].Len(), s.owners[9].Len(), len(s.byID))
	}
}

// call sends a request without a body and returns the whole answer.
func (h *testAPI) call(t *testing.T, method, path, key string) (status int, answer string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, h.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+key)
	response, err := h.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(raw)
}

// TestAResponseIsItsKeysAlone has another key try all ways to a response. What it gets is what it
// gets of a response that never was, and no worker is asked.
func TestAResponseIsItsKeysAlone(t *testing.T) {
	s := &storing{name: "a", has: map[string]bool{}, asked: map[string]int{}}
	config := setup{Keys: keys.Settings{APIKeysFile: strings.TrimPrefix(keysFile(t, "- {name: a, key: key-a}\n- {name: b, key: key-b}\n- {name: a-2, key: key-a2}"), "--api-keys-file=")}}
	h := newTestAPI(t, config, testkit.NewFakeWorker(t, s.serve).URL)
	_, text := h.post(t, proxy.ResponsesRoute, `{"model":"m","input":"hi"}`, "Authorization", "Bearer key-a")
	mine := gjson.Get(text, "id").Str
	if mine == "" {
		t.Fatal(text)
	}
	count := func() int {
		asked := s.searches("")
		s.mu.Lock()
		defer s.mu.Unlock()
		return asked + len(s.has)
	}
	for _, key := range []string{"key-b", "key-a2"} {
		for _, id := range []string{mine, "resp_never_was"} {
			before := count()
			for _, try := range []struct{ method, rest string }{{"GET", ""}, {"GET", "?stream=true&starting_after=1"}, {"DELETE", ""}, {"POST", "/cancel"}, {"GET", "/input_items"}} {
				if status, text := h.call(t, try.method, proxy.ResponsesRoute+"/"+id+try.rest, key); status != http.StatusNotFound || gjson.Get(text, "error.message").Str != "no worker has this response" {
					t.Errorf("%s %s%s by %s: %d %s", try.method, id, try.rest, key, status, text)
				}
			}
			for _, path := range []string{proxy.ResponsesRoute, proxy.ResponsesRoute + "/render"} {
				for _, body := range []string{`{"model":"m","input":"x","previous_response_id":%q}`, `{"model":"m","input":"x","previous\u005fresponse_id":%q}`, `{"previous_response_id":null,"model":"m","input":"x","previous_response_id":%q}`, `{"model":"m","input":"x","stream":true,"store":false,"previous_response_id":%q}`} {
					if response, text := h.post(t, path, fmt.Sprintf(body, id), "Authorization", "Bearer "+key); response.StatusCode != http.StatusNotFound || gjson.Get(text, "error.message").Str != "no worker has this response" {
						t.Errorf("%s %s by %s: %d %s", path, body, key, response.StatusCode, text)
					}
				}
			}
			if now := count(); now != before {
				t.Errorf("%s of %s reached a worker", id, key)
			}
		}
	}
	if response, text := h.post(t, proxy.ResponsesRoute, `{"model":"m","input":"x","conversation":{"id":"conv_1"}}`, "Authorization", "Bearer key-b"); response.StatusCode != http.StatusBadRequest || gjson.Get(text, "error.param").Str != "conversation" {
		t.Errorf("a conversation: %d %s", response.StatusCode, text)
	}
	for _, path := range []string{"", "/input_items", "/cancel"} {
		method := http.MethodGet
		if path == "/cancel" {
			method = http.MethodPost
		}
		if status, text := h.call(t, method, proxy.ResponsesRoute+"/"+mine+path, "key-a"); path == "" && status != http.StatusOK || path != "" && !strings.Contains(text, "404 page not found") {
			t.Errorf("%s %s by its owner: %d %s", method, path, status, text)
		}
	}
	if response, text := h.post(t, proxy.ResponsesRoute, fmt.Sprintf(`{"model":"m","input":"hi","previous_response_id":%q}`, mine), "Authorization", "Bearer key-a"); response.StatusCode != http.StatusOK {
		t.Errorf("continued by its owner: %d %s", response.StatusCode, text)
	}

	// Another router, which has heard of it, or not.
	config.Keys.APIKeysFile = strings.TrimPrefix(keysFile(t, "- {name: a, key: rotated}\n- {name: b, key: key-b}"), "--api-keys-file=")
	other := newTestAPI(t, config, testkit.NewFakeWorker(t, s.serve).URL)
	if status, text := other.call(t, http.MethodGet, proxy.ResponsesRoute+"/"+mine, "rotated"); status != http.StatusNotFound {
		t.Errorf("whose owner nobody knows: %d %s", status, text)
	}
	stored, _ := h.api.stored.of(mine)
	other.api.stored.Note(mine, stored.worker, stored.owner)
	for key, want := range map[string]int{"key-b": http.StatusNotFound, "rotated": http.StatusOK} {
		if status, text := other.call(t, http.MethodGet, proxy.ResponsesRoute+"/"+mine, key); status != want {
			t.Errorf("%s at another router: %d %s", key, status, text)
		}
	}
	if status, text := h.call(t, http.MethodDelete, proxy.ResponsesRoute+"/"+mine, "key-a"); status != http.StatusOK {
		t.Errorf("deleted by its owner: %d %s", status, text)
	}
}

// TestAResponseIsKnownBeforeItsClientKnowsIt has a client use a response while its stream runs.
func TestAResponseIsKnownBeforeItsClientKnowsIt(t *testing.T) {
	over := make(chan struct{})
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"id":"resp_1","status":"in_progress"}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\"}}\n\n")
		http.NewResponseController(w).Flush()
		<-over
		io.WriteString(w, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\"}}\n\n")
	})
	h := newTestAPI(t, setup{APIKey: []string{"key-a", "key-b"}}, worker.URL)
	request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+proxy.ResponsesRoute, strings.NewReader(`{"model":"m","input":"hi","stream":true,"background":true}`))
	request.Header = http.Header{"Authorization": {"Bearer key-a"}, "Content-Type": {"application/json"}}
	response, err := h.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := response.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]int{"key-a": http.StatusOK, "key-b": http.StatusNotFound} {
		if status, text := h.call(t, http.MethodGet, proxy.ResponsesRoute+"/resp_1", key); status != want {
			t.Errorf("%s: %d %s", key, status, text)
		}
	}
	close(over)
	io.Copy(io.Discard, response.Body)
}

// TestTheHolderOfAResponseIsHeard holds that no other worker's error hides a response, and that
// 404 is said only when all workers have said so.
func TestTheHolderOfAResponseIsHeard(t *testing.T) {
	s, ill := &storing{name: "a", has: map[string]bool{}, asked: map[string]int{}}, http.StatusOK
	var mu sync.Mutex
	holder := testkit.NewFakeWorker(t, s.serve)
	other := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if ill == http.StatusOK {
			hangUp(w, r)
			return
		}
		w.WriteHeader(ill)
		io.WriteString(w, `{"error":{"message":"of another worker"}}`)
	})
	h := newTestAPI(t, setup{}, holder.URL, other.URL)
	_, text := h.post(t, proxy.ResponsesRoute, `{"model":"m","input":"hi"}`)
	id := gjson.Get(text, "id").Str
	for _, c := range []struct{ status, unknown int }{
		{http.StatusInternalServerError, http.StatusBadGateway}, {http.StatusServiceUnavailable, http.StatusBadGateway}, {http.StatusUnauthorized, http.StatusBadGateway}, {http.StatusOK, http.StatusBadGateway},
		{http.StatusBadRequest, http.StatusNotFound}, {http.StatusNotFound, http.StatusNotFound},
	} {
		mu.Lock()
		ill = c.status
		mu.Unlock()
		fresh := newTestAPI(t, setup{}, holder.URL, other.URL) // which knows no response
		for _, path := range []string{id, "resp_never_was"} {
			want := http.StatusOK
			if path != id {
				want = c.unknown
			}
			for _, at := range []*testAPI{h, fresh} {
				if status, text := at.call(t, http.MethodGet, proxy.ResponsesRoute+"/"+path, ""); status != want || strings.Contains(text, "another worker") {
					t.Errorf("%s while another worker answers %d: %d %s, want %d", path, c.status, status, text, want)
				}
			}
		}
	}
}

// TestAResponsesStreamComesAsItIs holds that events are passed on one by one, as they are.
func TestAResponsesStreamComesAsItIs(t *testing.T) {
	next := make(chan struct{})
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "stream=true&starting_after=2" {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"id":"resp_1","status":"in_progress"}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("X-Kvrouter-Worker-Id", "of a router below")
		w.Header().Set("X-Ratelimit-Limit-Requests", "1")
		for i := range 3 {
			fmt.Fprintf(w, "id: %d\ndata: {}\n\n", i)
			http.NewResponseController(w).Flush()
			<-next
		}
		hangUp(w, r)
	})
	h := newTestAPI(t, setup{APIKey: []string{"one"}}, worker.URL)
	request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, h.URL+proxy.ResponsesRoute+"/resp_1?stream=true&starting_after=2", nil)
	request.Header.Set("Authorization", "Bearer one")
	response, err := h.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.Header.Get("Content-Type") != "text/event-stream" || response.Header.Get("X-Ratelimit-Limit-Requests") != "" || response.Header.Get("X-Kvrouter-Worker-Id") != "0" {
		t.Errorf("headers %v", response.Header)
	}
	for i := range 3 {
		event := make([]byte, len("id: 0\ndata: {}\n\n"))
		if _, err := io.ReadFull(response.Body, event); err != nil || string(event) != fmt.Sprintf("id: %d\ndata: {}\n\n", i) {
			t.Fatalf("event %d: %q, %v", i, event, err)
		}
		next <- struct{}{}
	}
	rest, _ := io.ReadAll(response.Body)
	if _, data, _ := strings.Cut(string(rest), "event: error\ndata: "); gjson.Get(data, "type").Str != "error" || gjson.Get(data, "message").Str == "" {
		t.Errorf("the end of a stream that broke off: %q", rest)
	}
}
