package models_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/encode"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
	"kvrouter/internal/testkit/tokenstest"
)

// testModelFolder is the folder of the model that the workers of the end-to-end
// tests serve.
func testModelFolder() string {
	return filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct")
}

// testModel opens that model.
func testModel(t testing.TB) *tokens.Model {
	t.Helper()
	m, err := tokenstest.Open(t.Context(), testModelFolder())
	if err != nil && testing.Short() {
		t.Skip("the test model is not set up: ", err)
	}
	if err != nil {
		t.Fatal("run make setup: ", err)
	}
	t.Cleanup(m.Close)
	return m
}

// englishWords are the tokenizer's own words, which are common English ones, by
// falling frequency.
func englishWords(m *tokens.Model) []string {
	var words []string
	for _, name := range m.Vocabulary() {
		word, starts := strings.CutPrefix(name, "Ġ")
		if starts && len(word) > 1 && strings.Trim(word, "abcdefghijklmnopqrstuvwxyz") == "" {
			words = append(words, word)
		}
	}
	return words
}

// proseOf returns n words as prose has them: few are frequent, one in 25 is
// made up, and there are sentences and paragraphs.
func proseOf(r *rand.Rand, words []string, n int) string {
	var b strings.Builder
	for i := range n {
		switch {
		case i%90 == 89:
			b.WriteString(".\n\n")
		case i%12 == 11:
			b.WriteString(", ")
		case i > 0:
			b.WriteByte(' ')
		}
		x := r.Float64()
		word := words[int(x*x*x*float64(len(words)))]
		if r.IntN(25) == 0 {
			word = words[r.IntN(len(words))] + words[r.IntN(len(words))]
		}
		b.WriteString(word)
	}
	return b.String()
}

// chatBody is a streamed chat request with the given contents in turn.
func chatBody(contents ...string) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	messages := []message{{"system", "You are a helpful assistant."}}
	for i, c := range contents {
		messages = append(messages, message{[]string{"user", "assistant"}[i%2], c})
	}
	body, _ := json.Marshal(map[string]any{"model": "m", "messages": messages, "stream": true, "max_tokens": 32})
	return body
}

// BenchmarkDecision measures a whole routing decision over 8 workers: render,
// encode, hash, look up, schedule. Hot prompts have come before and their blocks
// are in the index; cold ones are new in every word order.
func BenchmarkDecision(b *testing.B) {
	m := testModel(b)
	m.SetMaxModelLen(1 << 17) // the test model's own limit is 8,192
	words := englishWords(m)
	r := rand.New(rand.NewPCG(5, 5))
	var turns []string
	for range 41 {
		turns = append(turns, proseOf(r, words, 2050))
	}
	for _, c := range []struct {
		name   string
		hot    bool
		bodies int
		body   func() []byte
	}{
		{"hot/1500-words", true, 64, func() []byte { return chatBody(proseOf(r, words, 1500)) }},
		{"cold/1500-words", false, 2000, func() []byte { return chatBody(proseOf(r, words, 1500)) }},
		{"hot/100k-tokens-one-message", true, 4, func() []byte { return chatBody(proseOf(r, words, 84_000)) }},
		{"hot/100k-tokens-41-turns", true, 1, func() []byte { return chatBody(turns...) }},
		{"hot/100k-tokens-41-turns-new-question", false, 64, func() []byte {
			return chatBody(append(turns[:40:40], proseOf(r, words, 60))...)
		}},
		{"cold/100k-tokens-one-message", false, 40, func() []byte { return chatBody(proseOf(r, words, 84_000)) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			index := radix.NewTree()
			rt := router.New(testkit.Defaults[router.Settings](), router.Deps{Index: index, Policy: policytest.MustPolicy(b, "standalone"), BlockSize: 64, Seed: 1})
			for w := range uint64(8) {
				rt.Up(kv.Target{Key: kv.WorkerKey{Worker: w}, URL: "http://w"})
			}
			ids := tokens.NewSource(m, nil, time.Second, slog.New(slog.DiscardHandler))
			m.CacheTokens(encode.DefaultCache)
			var bodies [][]byte
			for i := range c.bodies {
				body := c.body()
				bodies = append(bodies, body)
				if c.hot || i == 0 {
					p := ids.ChatBody(context.Background(), tokenstest.Body(body))
					local := kv.HashBlocks(nil, p.Tokens, 64, "", "")
					if err := radixtest.Store(index, kv.WorkerKey{Worker: uint64(i % 8)}, 0, false, testkit.Chain(local)); err != nil {
						b.Fatal(err)
					}
				}
			}
			if c.name == "cold/1500-words" || c.name == "cold/100k-tokens-one-message" {
				m.CacheTokens(0)
			}
			var total, overlap int
			i := 0
			cpu := testkit.CPUTime()
			b.ReportAllocs()
			for b.Loop() {
				p := ids.ChatBody(context.Background(), tokenstest.Body(bodies[i%len(bodies)]))
				d, err := rt.Route(context.Background(), router.Request{Tokens: p.Tokens[:p.Exact], NumTokens: len(p.Tokens)})
				if err != nil {
					b.Fatal(err)
				}
				d.Booking.End()
				total += d.Tokens
				overlap += d.OverlapTokens
				i++
			}
			b.ReportMetric(float64(testkit.CPUTime()-cpu)/float64(i), "cpu-ns/op")
			b.ReportMetric(float64(total)/float64(i), "tokens/op")
			b.ReportMetric(100*float64(overlap)/float64(total), "%overlap")
		})
	}
}
