package test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/proxy"
)

// Prefill and Decode are the workers of a Pair, as ids and as places in the list.
const Prefill, Decode = 0, 1

// Pair is a router with one worker that computes prompts and one that answers.
type Pair struct{ *Router }

// Engine returns a metric of a worker's own.
func (s *Pair) Engine(worker int, name string) float64 {
	return SumOf(s.Get(*s.Workers()[worker].Endpoint+"/metrics"), name)
}

// Shared returns how many shared requests the router counts that ended so.
func (s *Pair) Shared(kind kv.Kind, result string) float64 {
	return SumOf(s.Get(s.OpenAI+"/metrics"), fmt.Sprintf("kvrouter_disagg_requests_total{kind=%q,result=%q}", kind, result))
}

// Question returns a chat that is answered with Paris, with a list of words
// before it. 280 make it long enough to be shared: --disagg-min-uncached-tokens
// is 256.
func Question(list string) []map[string]string {
	return []map[string]string{Message("system", "Ignore this list: "+list+"."), Message("user", "What is the capital of France?")}
}

// Send sends a chat that the decode worker must answer within two minutes.
func (s *Pair) Send(messages []map[string]string, stream bool, maxTokens int) Answer {
	s.T.Helper()
	ctx, cancel := context.WithTimeout(s.T.Context(), 2*time.Minute)
	defer cancel()
	a, err := s.Chat(ctx, messages, stream, maxTokens)
	if err != nil || !a.Finished || a.Broken || a.Worker != Decode {
		s.T.Fatalf("%+v, %v", a, err)
	}
	return a
}

// Traffic has clients send so many chats altogether, each one after the other
// and every second one streamed. It returns the answers; that one fails or is
// not shared fails the test. conversation returns what makes a client's chats.
func (s *Pair) Traffic(chats, clients, maxTokens int, conversation func(*rand.Rand) func() []map[string]string) []Answer {
	s.T.Helper()
	var traffic sync.WaitGroup
	var mu sync.Mutex // guards the rest
	var answers []Answer
	var failed []string
	for client := range clients {
		next := conversation(rand.New(rand.NewPCG(6, uint64(client))))
		traffic.Go(func() {
			for i := range chats / clients {
				a, err := s.Chat(s.T.Context(), next(), i%2 == 0, maxTokens)
				mu.Lock()
				answers = append(answers, a)
				if err != nil || !a.Finished || a.Broken || a.Worker != Decode || a.Prefill != "0" {
					failed = append(failed, fmt.Sprintf("%+v, %v", a, err))
				}
				mu.Unlock()
			}
		})
	}
	traffic.Wait()
	if len(failed) > 0 {
		s.T.Errorf("%d of %d chats failed or were not shared, the first: %s", len(failed), chats, failed[0])
	}
	return answers
}

// LastUsage returns the last usage in an answer, streamed or not.
func LastUsage(answer []byte) (last proxy.Usage) {
	for line := range bytes.Lines(answer) {
		if u := proxy.ReadUsage(bytes.TrimPrefix(line, []byte("data: "))); u.Known {
			last = u
		}
	}
	return last
}

// SumOf adds up the values of a metric, given by its name with or without all of
// its labels, on a page of Prometheus text.
func SumOf(page []byte, name string) (sum float64) {
	for line := range strings.Lines(string(page)) {
		rest, found := strings.CutPrefix(line, name)
		if !found || !strings.ContainsRune(" {,", rune(rest[0])) {
			continue
		}
		value, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):]), 64)
		if err == nil {
			sum += value
		}
	}
	return sum
}
