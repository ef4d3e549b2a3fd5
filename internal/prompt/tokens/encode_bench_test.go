package tokens

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"kvrouter/internal/prompt/encode"
	"kvrouter/internal/testkit"
)

// prose returns a text of about n tokens of the test model in which few words are
// frequent and one in 25 is made up.
func prose(r *rand.Rand, words []string, n int) string {
	var b strings.Builder
	for i := range n * 84 / 100 {
		switch {
		case i%90 == 89:
			b.WriteString(".\n\n")
		case i%12 == 11:
			b.WriteString(", ")
		case i > 0:
			b.WriteByte(' ')
		}
		x := r.Float64()
		b.WriteString(words[int(x*x*x*float64(len(words)))])
		if r.IntN(25) == 0 {
			b.WriteString(words[r.IntN(len(words))])
		}
	}
	return b.String()
}

// BenchmarkEncode measures a chat's text of 10 turns on its way to tokens: cold is
// new in every word order, hot has come before, shared is new in its last turn of 60
// words; parallel is cold in 32 goroutines at once.
func BenchmarkEncode(b *testing.B) {
	m := testModel(b)
	var words []string
	for _, name := range m.Vocabulary() {
		word, starts := strings.CutPrefix(name, "Ġ")
		if starts && len(word) > 1 && strings.Trim(word, "abcdefghijklmnopqrstuvwxyz") == "" {
			words = append(words, word)
		}
	}
	const turns = 10
	chat := func(r *rand.Rand, n int) string {
		var b strings.Builder
		for range turns {
			b.WriteString("<|im_start|>user\n" + prose(r, words, n/turns) + "<|im_end|>\n")
		}
		return b.String()
	}
	for _, n := range []int{600, 6000, 100_000} {
		r := rand.New(rand.NewPCG(5, uint64(n)))
		base := chat(r, n)
		texts := map[string][]string{"hot": {base}}
		for range min(200, 6_000_000/n) {
			texts["cold"] = append(texts["cold"], chat(r, n))
			texts["shared"] = append(texts["shared"], base+"<|im_start|>user\n"+prose(r, words, 60)+"<|im_end|>\n")
		}
		for _, kind := range []string{"cold", "hot", "shared", "parallel"} {
			b.Run(fmt.Sprintf("%s/%d", kind, n), func(b *testing.B) {
				list := texts[kind]
				if kind == "cold" || kind == "parallel" {
					list = texts["cold"]
					m.CacheTokens(0)
					defer m.CacheTokens(encode.DefaultCache)
				} else {
					m.CacheTokens(encode.DefaultCache)
				}
				tokensOf := func(text string) int {
					tokens, err := m.encode(bounds{}, text, false)
					if err != nil {
						b.Fatal(err)
					}
					return len(tokens)
				}
				tokensOf(base)
				b.ReportAllocs()
				cpu, i, tokens := testkit.CPUTime(), 0, 0
				if kind == "parallel" {
					b.SetParallelism(32 / 2)
					b.RunParallel(func(pb *testing.PB) {
						for j := rand.IntN(len(list)); pb.Next(); j++ {
							tokensOf(list[j%len(list)])
						}
					})
					b.ReportMetric(float64(testkit.CPUTime()-cpu)/float64(b.N), "cpu-ns/op")
					return
				}
				for b.Loop() {
					tokens = tokensOf(list[i%len(list)])
					i++
				}
				b.ReportMetric(float64(testkit.CPUTime()-cpu)/float64(i), "cpu-ns/op")
				b.ReportMetric(float64(tokens), "tokens/op")
			})
		}
	}
}

func BenchmarkEncode60KB(b *testing.B) {
	m := testModel(b)
	text := strings.Repeat("The quick brown fox jumps over the lazy dog, 12345 times. ", 1000)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	var tokens int
	for b.Loop() {
		tokens = len(m.Encode(text, false))
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(tokens), "ns/token")
}
