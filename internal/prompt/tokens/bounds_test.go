package tokens

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/testkit"
)

func TestPromptsThatNoModelTakesAreNotEncoded(t *testing.T) {
	m := wordModel(t, chat.Options{}) // 99 tokens of at most 9 characters
	ids := func(n int) string { return "[" + strings.Repeat("7,", n-1) + "7]" }
	for _, test := range []struct {
		name, body string
		prompts    int
		source     string
	}{
		{"a text that fits", `{"prompt":"` + strings.Repeat("a ", 98) + `"}`, 1, SourceLocal},
		{"one that fits by its characters only", `{"prompt":"` + strings.Repeat("é", 99*9) + `"}`, 1, SourceLocal},
		{"a longer text", `{"prompt":"` + strings.Repeat("a", 99*9+1) + `"}`, 1, SourceNone},
		{"ids that fit", `{"prompt":` + ids(99) + `}`, 1, SourceLocal},
		{"more ids", `{"prompt":` + ids(100) + `}`, 1, SourceNone},
		{"a list", `{"prompt":["a",[7]]}`, 2, SourceLocal},
		{"a list with one that is too long", `{"prompt":["a",` + ids(100) + `]}`, 2, SourceNone},
		{"a list of one", `{"prompt":[` + ids(100) + `]}`, 1, SourceNone},
		{"a list with too much in all", `{"prompt":[` + strings.Repeat(ids(99)+",", 40) + `"a"]}`, 2, SourceNone},
		{"too many prompts", `{"prompt":[` + strings.Repeat(`"",`, maxPrompts) + `"a"]}`, 2, SourceNone},
	} {
		w := &askedWorker{renders: true}
		source := NewSource(m, w.ask, time.Second, quiet())
		got := source.Completion(context.Background(), []byte(test.body))
		if len(got) != test.prompts || got[0].Source != test.source || len(w.asked) != 0 {
			t.Errorf("%s: %d prompts from %q, the worker was asked %d times", test.name, len(got), got[0].Source, len(w.asked))
		}
		if n := source.Stats().Reasons[reasonTooLong]; (n == 1) != (test.source == SourceNone) {
			t.Errorf("%s: counted %d times", test.name, n)
		}
	}
}

func TestChatsThatNoModelTakesAreNotRendered(t *testing.T) {
	m := wordModel(t, chat.Options{})
	long := strings.Repeat("a ", 500)
	for _, test := range []struct {
		name, body string
		source     string
	}{
		{"short", `{"messages":[{"role":"user","content":"a"}]}`, SourceLocal},
		{"long", `{"messages":[{"role":"user","content":"` + long + `"}]}`, SourceNone},
		{"long by the sum of its parts", `{"messages":[` + strings.Repeat(`{"role":"user","content":[{"type":"text","text":"`+long[:300]+`"}]},`, 3) + `{"role":"user","content":"a"}]}`, SourceNone},
		{"long by what the assistant said", `{"messages":[{"role":"assistant","content":"` + long + `"},{"role":"user","content":"a"}]}`, SourceNone},
	} {
		w := &askedWorker{renders: true}
		source := NewSource(m, w.ask, time.Second, quiet())
		if p := source.Chat(context.Background(), []byte(test.body)); p.Source != test.source || len(w.asked) != 0 {
			t.Errorf("%s: from %q, the worker was asked %d times", test.name, p.Source, len(w.asked))
		}
	}
	if _, err := m.ChatTokens([]byte(`{"messages":[{"role":"user","content":"` + long + `"}]}`)); err != nil {
		t.Errorf("without bounds: %v", err)
	}
}

func TestTokenizeOfATooLongPromptIsLeftToAWorker(t *testing.T) {
	w := &askedWorker{answer: map[string]string{"/tokenize": `{"count":9}`}}
	source := NewSource(wordModel(t, chat.Options{}), w.ask, time.Second, quiet())
	if got, err := source.Tokenize(context.Background(), []byte(`{"prompt":"`+strings.Repeat("a ", 500)+`"}`)); err != nil || string(got) != `{"count":9}` {
		t.Errorf("%s, %v", got, err)
	}
	var bad *BadRequest
	if _, err := source.Detokenize(context.Background(), []byte(`{"tokens":[`+strings.Repeat("1,", maxDetokenized)+`1]}`)); !errors.As(err, &bad) {
		t.Error(err)
	}
}

func TestLongestToken(t *testing.T) {
	for text, want := range map[string]int{
		wordTokenizer: 9,
		`{"model":{"vocab":[["é日本",-1],["a",0]]},"added_tokens":[{"content":"<x>"},{"content":"12345"}]}`: 5,
		`{"model":{"vocab":{"é日本":1}}}`: 3,
		`{}`:                            0,
	} {
		if got := longestToken([]byte(text)); got != want {
			t.Errorf("%d, want %d: %.60s", got, want, text)
		}
	}
}

func TestSmallTextsDoNotWaitForLargeOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns()
		within := bounds{ctx: t.Context(), wait: 2 * time.Second, text: chat.MaxText}
		for range cap(turns.large) {
			if _, err := turns.take(within, largeText+1); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := turns.take(within, hugeText+1); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := turns.take(within, largeText); err != nil || time.Since(began) != 0 {
			t.Errorf("a small text: %v after %v", err, time.Since(began))
		}
		for _, size := range []int{largeText + 1, hugeText + 1} {
			began = time.Now()
			if _, err := turns.take(within, size); !errors.Is(err, errNoTurn) || time.Since(began) != within.wait {
				t.Errorf("%d bytes: %v after %v", size, err, time.Since(began))
			}
			ctx, leave := context.WithTimeout(t.Context(), time.Second)
			began = time.Now()
			if _, err := turns.take(bounds{ctx: ctx, wait: within.wait}, size); !errors.Is(err, errNoTurn) || time.Since(began) != time.Second {
				t.Errorf("%d bytes of a client that leaves: %v after %v", size, err, time.Since(began))
			}
			leave()
		}
		if _, err := turns.take(within, chat.MaxText+1); !errors.Is(err, errTooLong) {
			t.Errorf("more than any prompt: %v", err)
		}
		done := make(chan struct{})
		go func() { // until the turn below is given back
			turn, err := turns.take(bounds{}, hugeText+1)
			if err == nil {
				<-turn
			}
			close(done)
		}()
		synctest.Wait()
		<-turns.huge
		<-done
	})
}

func TestAPromptWithoutATurnIsRoutedByLoad(t *testing.T) {
	m := wordModel(t, chat.Options{})
	for range cap(m.turns.small) {
		m.turns.small <- struct{}{}
	}
	w := &askedWorker{renders: true}
	source := NewSource(m, w.ask, 10*time.Millisecond, quiet())
	if p := source.Chat(context.Background(), []byte(textChat)); p.Source != SourceNone || len(w.asked) != 0 || source.Stats().Reasons[reasonNoTurn] != 1 {
		t.Errorf("%+v, %+v", p, source.Stats())
	}
	for range cap(m.turns.small) {
		<-m.turns.small
	}
	if p := source.Chat(context.Background(), []byte(textChat)); p.Source != SourceLocal {
		t.Errorf("%+v", p)
	}
}

// differing returns a peer that renders as m does, but for the features of bodies
// that differs names.
func differing(m *Model, id uint64, differs func(body []byte) bool) Peer {
	return Peer{ID: id, Generation: 1, Ask: probeWorker(m, func(_ string, body []byte, tokens []uint32) []uint32 {
		if differs(body) {
			return append(slices.Clone(tokens), 8)
		}
		return tokens
	})}
}

func TestMostWorkersDecideWhatIsRenderedHere(t *testing.T) {
	m := wordModel(t, chat.Options{})
	all := func([]byte) bool { return true }
	none := func([]byte) bool { return false }
	tools := func(b []byte) bool { return gjson.GetBytes(b, "tools").Exists() }
	mute := Peer{ID: 9, Generation: 1, Ask: (&askedWorker{renders: true}).ask}
	everything := []string{"chat", "completion", "continue", "parts", "tool_calls", "tools"}
	now := time.Unix(1000, 0)
	source := NewSource(m, nil, time.Second, quiet())
	source.now = func() time.Time { return now }
	for _, step := range []struct {
		name  string
		peers []Peer
		want  []string
	}{
		{"the only one differs", []Peer{differing(m, 1, all)}, everything},
		{"others do not tell", []Peer{differing(m, 1, all), mute}, everything},
		{"one of two agrees", []Peer{differing(m, 1, all), differing(m, 2, none)}, nil},
		{"two of three differ in tools", []Peer{differing(m, 1, all), differing(m, 2, none), differing(m, 3, tools)}, []string{"tools"}},
		{"nobody is there", nil, []string{"tools"}},
		{"the one that differed is gone", []Peer{differing(m, 2, none), mute}, nil},
		{"it comes back", []Peer{differing(m, 1, all), mute}, everything},
		{"those that do not tell are left", []Peer{mute}, nil},
	} {
		source.compareWith(context.Background(), step.peers)
		if got := source.Stats().Disabled; !slices.Equal(got, step.want) {
			t.Errorf("%s: %v, want %v", step.name, got, step.want)
		}
	}
}

func TestAWorkerThatDifferedIsComparedAgain(t *testing.T) {
	m := wordModel(t, chat.Options{})
	now := time.Unix(1000, 0)
	source := NewSource(m, nil, time.Second, slog.New(slog.DiscardHandler))
	source.now = func() time.Time { return now }
	wrong := true
	peer := differing(m, 1, func([]byte) bool { return wrong })
	source.compareWith(context.Background(), []Peer{peer})
	wrong = false
	source.compareWith(context.Background(), []Peer{peer})
	if len(source.Stats().Disabled) == 0 {
		t.Error("it was asked again at once")
	}
	now = now.Add(compareAgain)
	source.compareWith(context.Background(), []Peer{peer})
	if got := source.Stats().Disabled; len(got) != 0 {
		t.Error(got)
	}
	wrong = true
	now = now.Add(time.Hour)
	source.compareWith(context.Background(), []Peer{peer})
	if got := source.Stats().Disabled; len(got) != 0 {
		t.Errorf("one that agreed was asked again: %v", got)
	}
	peer.Generation++
	source.compareWith(context.Background(), []Peer{peer})
	if len(source.Stats().Disabled) == 0 {
		t.Error("a new incarnation was not compared")
	}
}

func TestAWorkerThatDoesNotAnswerIsAskedLessAndLess(t *testing.T) {
	w := &askedWorker{fail: errors.New("connection refused")}
	m := wordModel(t, chat.Options{})
	now := time.Unix(1000, 0)
	source := NewSource(m, nil, time.Second, quiet())
	source.now = func() time.Time { return now }
	for range 600 {
		source.compareWith(context.Background(), []Peer{{ID: 1, Ask: w.ask}})
		now = now.Add(time.Second)
	}
	if n := len(w.asked); n < 10 || n > 20 {
		t.Errorf("asked %d times in 10 minutes", n)
	}
}

func TestTheLongestLimitOfAWorkerCounts(t *testing.T) {
	m := wordModel(t, chat.Options{})
	peer := func(id uint64, limit int) Peer {
		p := differing(m, id, func([]byte) bool { return false })
		p.MaxModelLen = func(context.Context) int { return limit }
		return p
	}
	source := NewSource(m, nil, time.Second, quiet())
	for _, step := range []struct {
		peers []Peer
		want  int
	}{
		{[]Peer{peer(1, 0)}, 99},
		{[]Peer{peer(1, 0), peer(2, 50)}, 50},
		{[]Peer{peer(2, 50), peer(3, 70)}, 70},
		{[]Peer{peer(2, 50), peer(4, 1<<62)}, maxModelLen},
		{[]Peer{peer(5, -3)}, maxModelLen}, // it reports nothing
	} {
		source.compareWith(context.Background(), step.peers)
		if got := m.MaxModelLen(); got != step.want {
			t.Errorf("%d, want %d", got, step.want)
		}
	}
}

func TestComparingEndsWithItsContext(t *testing.T) {
	m := wordModel(t, chat.Options{})
	ctx, cancel := context.WithCancel(context.Background())
	asked := make(chan struct{}, 1)
	done := make(chan struct{})
	source := NewSource(m, nil, time.Second, quiet())
	go func() { // until cancel
		source.KeepComparing(ctx, func() []Peer {
			select {
			case asked <- struct{}{}:
			default:
			}
			return nil
		})
		close(done)
	}()
	<-asked
	cancel()
	<-done
}

// FuzzRendered reads what workers may answer to render routes.
func FuzzRendered(f *testing.F) {
	f.Add([]byte(`{"token_ids":[4,2,9,9,5],"features":{"mm_placeholders":{"image":[{"offset":2,"length":2}]}}}`))
	f.Add([]byte(`{"token_ids":[4,9,9,5],"features":{"mm_hashes":{"image":["a"],"a.b":[]},"mm_placeholders":{"image":[{"offset":1,"length":2}],"a.b":[]}}}`))
	f.Add([]byte(`[{"token_ids":[1]},{"token_ids":[]},{"token_ids":null}]`))
	f.Add([]byte(`{"token_ids":[1e400,-1,4294967296,0.5]}`))
	f.Add([]byte(`{"token_ids":[1],"features":{"mm_placeholders":null}}`))
	f.Add([]byte(`{"token_ids":[1],"features":{"mm_placeholders":{"a":null,"b":"x","c":[{"offset":1e300},{"offset":-5}]}}}`))
	f.Add([]byte(`{"token_ids":[1,[2,{"a":3}],`))
	f.Add([]byte(`[[[[[`))
	f.Fuzz(func(t *testing.T, answer []byte) {
		list := readRenderedList(answer, "s")
		if p, ok := readRendered(gjson.ParseBytes(answer), "s"); ok {
			list = append(list, p)
		}
		for _, p := range list {
			if len(p.Tokens) == 0 || p.Exact < 0 || p.Exact > len(p.Tokens) || len(p.Tokens) > len(answer) {
				t.Fatalf("%+v", p)
			}
			end := 0
			for _, m := range p.Media {
				if m.Start < end || m.End <= m.Start || m.Start >= p.Exact || m.End > len(p.Tokens) {
					t.Fatalf("%+v", p)
				}
				end = m.End
			}
		}
	})
}

// FuzzCompletionBody reads the prompts of bodies, within bounds and without.
func FuzzCompletionBody(f *testing.F) {
	for _, body := range []string{`{"prompt":"a b"}`, `{"prompt":[7,8]}`, `{"prompt":["a",[7]]}`, `{"prompt":[[],""]}`, `{"prompt":[{}]}`, `{"prompt":[1,"a"]}`, `{"prompt":"` + strings.Repeat("a", 2000) + `"}`, `{"prompt":[7.5]}`, `{"prompt":null,"prompt":[]}`} {
		f.Add([]byte(body))
	}
	m, err := NewModel("words", func() ([]byte, error) { return []byte(wordTokenizer), nil }, &chat.Files{MaxModelLen: 20}, chat.Options{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		body, ok := jsonbody.Parse(raw)
		if !ok {
			return
		}
		free, freeErr := m.CompletionBodyTokens(body)
		bound, err := m.boundedCompletionTokens(m.bounds(t.Context(), time.Second), body)
		if err == nil && (freeErr != nil || len(free) != len(bound)) {
			t.Fatalf("%d prompts within bounds, %d without: %v", len(bound), len(free), freeErr)
		}
		if err != nil && freeErr == nil && !errors.Is(err, errTooLong) {
			t.Fatal(err)
		}
	})
}

func TestEncodingEndsWhenTheClientLeaves(t *testing.T) {
	m := testModel(t)
	m.CacheTokens(0)
	text := strings.Repeat("<|im_start|>user\n"+strings.Repeat("so much to say ", 2000)+"<|im_end|>\n", 40)
	if _, err := m.encode(bounds{ctx: &leavingClient{Context: t.Context(), looks: 3}}, text, false); !errors.Is(err, errClientLeft) {
		t.Errorf("encoded to the end: %v", err)
	}
}

// leavingClient is the context of a client that leaves while it is looked at.
type leavingClient struct {
	context.Context
	looks int
}

func (c *leavingClient) Err() error {
	if c.looks--; c.looks < 0 {
		return context.Canceled
	}
	return nil
}

func TestDetokenizeAsksAWorkerIfTheFileHasChanged(t *testing.T) {
	dir := t.TempDir()
	testkit.TokenizerFolder(t, dir)
	m, err := openModel(dir, chat.Options{}, chat.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	testkit.TokenizerFolder(t, dir, [2]string{"a", "b"})
	if got := m.Decode([]uint32{1}); got != "" {
		t.Errorf("decoded as %q", got)
	}
	w := &askedWorker{answer: map[string]string{"/detokenize": `{"prompt":"a"}`}}
	source := NewSource(m, w.ask, time.Second, quiet())
	if got, err := source.Detokenize(t.Context(), []byte(`{"tokens":[1]}`)); err != nil || string(got) != `{"prompt":"a"}` {
		t.Errorf("a worker was not asked: %s, %v", got, err)
	}
}
