package proxy

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// generateStream is the body of a stream as SGLang 0.5.23 sent it.
func generateStream(t testing.TB) []byte {
	t.Helper()
	capture, err := os.ReadFile("testdata/sglang-generate-stream.txt")
	if err != nil {
		t.Fatal(err)
	}
	return capture[bytes.Index(capture, []byte("data: ")):]
}

func parsed(t testing.TB, text string) *jsonbody.Body {
	t.Helper()
	body, ok := jsonbody.Parse([]byte(text))
	if !ok {
		t.Fatalf("%s is no object", text)
	}
	return body
}

func TestOutcomeOfWholeAnswers(t *testing.T) {
	const one = `{"text":"a","meta_info":{"finish_reason":{"type":"length","length":8},"prompt_tokens":70,"completion_tokens":8,"cached_tokens":0}}`
	known := func(prompt, output, cached int) Usage {
		return Usage{Known: true, PromptTokens: prompt, OutputTokens: output, CachedKnown: true, CachedTokens: cached}
	}
	for _, test := range []struct {
		name, route, body string
		usage             Usage
		finish            string
	}{
		{"an answer", generateRoute, one, known(70, 8, 0), "length"},
		{"several", generateRoute, `[` + one + `,{"meta_info":{"finish_reason":{"type":"stop"},"prompt_tokens":5,"completion_tokens":2,"cached_tokens":4}}]`, known(75, 10, 4), "length"},
		{"aborted", generateRoute, `{"meta_info":{"finish_reason":{"type":"abort","message":"Aborted"},"prompt_tokens":5,"completion_tokens":1,"cached_tokens":0}}`, known(5, 1, 0), "abort"},
		{"tiers", generateRoute, `{"meta_info":{"prompt_tokens":99,"completion_tokens":1,"cached_tokens":70,"cached_tokens_details":{"device":10,"host":20,"storage":40,"storage_backend":"HiCacheFile"}}}`, Usage{Known: true, PromptTokens: 99, OutputTokens: 1, CachedKnown: true, CachedTokens: 70, CachedByTier: kv.TierTokens{Device: 10, Host: 20, Disk: 40}}, ""},
		{"a store behind the network", generateRoute, `{"meta_info":{"prompt_tokens":99,"completion_tokens":1,"cached_tokens":40,"cached_tokens_details":{"device":null,"host":-3,"storage":40,"storage_backend":"MooncakeStore"}}}`, Usage{Known: true, PromptTokens: 99, OutputTokens: 1, CachedKnown: true, CachedTokens: 40, CachedByTier: kv.TierTokens{External: 40}}, ""},
		{"foreign numbers", generateRoute, `{"meta_info":{"prompt_tokens":1e300,"completion_tokens":-4,"cached_tokens":null}}`, Usage{Known: true, PromptTokens: maxReportedPrompt, Partial: true}, ""},
		{"an error", generateRoute, `{"error":{"message":"The input is too long"}}`, Usage{}, ""},
		{"no JSON", generateRoute, `{"meta_info":`, Usage{}, ""},
		{"another route", "/v1/completions", `{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":2}}}`, known(3, 1, 2), "stop"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if usage, finish := outcome(test.route, []byte(test.body)); usage != test.usage || finish != test.finish {
				t.Errorf("%+v %q, want %+v %q", usage, finish, test.usage, test.finish)
			}
		})
	}
}

func TestStreamsOfGenerateAreRead(t *testing.T) {
	event := func(index, output int, reason string) string {
		return fmt.Sprintf(`data: {"text":"\"meta_info\":{\"prompt_tokens\":99}","meta_info":{"finish_reason":%s,"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":4},"index":%d}`+"\n\n", reason, 10*(index+1), output, index)
	}
	for _, test := range []struct {
		name, stream string
		usage        Usage
		ending       policy.Ending
	}{
		{"as captured", string(generateStream(t)), Usage{Known: true, PromptTokens: 43, OutputTokens: 8, CachedKnown: true, CachedTokens: 32, CachedByTier: kv.TierTokens{Device: 32}}, policy.Finished},
		{"several answers, in turn", event(0, 1, "null") + event(1, 1, "null") + event(0, 2, `{"type":"stop"}`) + event(1, 3, `{"type":"length"}`) + streamEnd, Usage{Known: true, PromptTokens: 30, OutputTokens: 5, CachedKnown: true, CachedTokens: 8}, policy.Finished},
		{"aborted by its client", event(0, 1, `{"type":"abort","message":"Aborted"}`) + streamEnd, Usage{Known: true, PromptTokens: 10, OutputTokens: 1, CachedKnown: true, CachedTokens: 4}, policy.Abandoned},
		{"refused", `data: {"error":{"message":"too long","type":"invalid_request_error","code":400,"retryable":false}}` + "\n\n" + streamEnd, Usage{}, policy.Abandoned},
		{"broken off", event(0, 1, "null"), Usage{Known: true, PromptTokens: 10, OutputTokens: 1, CachedKnown: true, CachedTokens: 4}, policy.Failed},
		{"an index that is none", strings.Replace(event(0, 1, "null"), `"index":0`, `"index":99999999`, 1) + streamEnd, Usage{Partial: true}, policy.Finished},
	} {
		for size := range min(len(test.stream), 40) {
			s := eventScanner{Generate: true}
			var shown bytes.Buffer
			for rest := []byte(test.stream); len(rest) > 0; {
				n := min(size*7+1, len(rest))
				shown.Write(s.Scan(rest[:n]))
				rest = rest[n:]
			}
			if shown.String() != test.stream || s.usage() != test.usage || s.ending(200, true) != test.ending {
				t.Fatalf("%s, pieces of %d: %+v, ending %v; want %+v, %v", test.name, size*7+1, s.usage(), s.ending(200, true), test.usage, test.ending)
			}
		}
	}
}

// TestLongStreamsOfGenerateTakeNoMoreMemory: each event has the whole text so far.
func TestLongStreamsOfGenerateTakeNoMoreMemory(t *testing.T) {
	s := eventScanner{Generate: true}
	most := 0
	for n := 1; n < 3*maxEvent; n += maxEvent / 8 {
		event := fmt.Sprintf(`data: {"text":"%s","meta_info":{"prompt_tokens":1,"completion_tokens":%d,"cached_tokens":0}}`+"\n\n", strings.Repeat("x", n), n)
		for rest := []byte(event); len(rest) > 0; {
			piece := min(16<<10, len(rest))
			s.Scan(rest[:piece])
			most = max(most, cap(s.pending))
			rest = rest[piece:]
		}
	}
	if most > 3*maxEvent {
		t.Errorf("%d bytes were kept of events of at most %d", most, maxEvent)
	}
	if n := s.usage().OutputTokens; n < maxEvent/2 {
		t.Errorf("%d tokens were read", n)
	}
}

func FuzzGenerated(f *testing.F) {
	f.Add(generateStream(f))
	f.Add([]byte(`data: {"meta_info":{"prompt_tokens":-1},"index":-1}` + "\n\n"))
	f.Add([]byte(`data: {"meta_info":{"prompt_tokens":"x","finish_reason":{"type":1}},"index":4095}` + "\n\ndata: [DONE]\n\n"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		s := eventScanner{Generate: true}
		if got := s.Scan(stream); !bytes.Equal(got, stream) {
			t.Fatalf("%q became %q", stream, got)
		}
		whole, _ := outcome(generateRoute, stream)
		for _, u := range []Usage{s.usage(), whole} {
			if u.PromptTokens < 0 || u.PromptTokens > maxReportedPrompt || u.OutputTokens < 0 || u.OutputTokens > maxReportedOutput || u.CachedTokens < 0 || len(s.generated.answers) > maxGenerated {
				t.Fatalf("%q reads as %+v", stream, u)
			}
		}
	})
}

func TestWhatARequestWants(t *testing.T) {
	for _, test := range []struct {
		route, body string
		several     bool
		limit       int
		anew        bool
	}{
		{"/v1/chat/completions", `{}`, false, 0, false},
		{"/v1/chat/completions", `{"n":2,"max_tokens":5}`, true, 5, false},
		{"/v1/chat/completions", `{"n":1,"max_tokens":5,"max_completion_tokens":7}`, false, 7, false},
		{"/v1/chat/completions", `{"use_beam_search":true,"prompt_logprobs":1}`, true, 0, true},
		{"/v1/completions", `{"best_of":2,"max_tokens":-1}`, true, 0, false},
		{"/v1/completions", `{"echo":true,"logprobs":1,"max_tokens":1e300}`, false, maxReportedOutput, true},
		{"/v1/responses", `{"max_output_tokens":3,"sampling_params":{"n":2}}`, false, 3, false},
		{generateRoute, `{"n":2}`, false, 128, false},
		{generateRoute, `{"sampling_params":{"n":2,"max_new_tokens":4}}`, true, 4, false},
		{generateRoute, `{"sampling_params":[{"n":1},{"n":3}]}`, true, 128, false},
		{generateRoute, `{"sampling_params":[{"n":1},7,null]}`, false, 128, false},
		{generateRoute, `{"sampling_params":[{"max_new_tokens":3},{"max_new_tokens":200}]}`, false, 200, false},
		{generateRoute, `{"sampling_params":[{"max_new_tokens":3},{"max_new_tokens":null},{"max_new_tokens":5}]}`, false, 0, false},
		{generateRoute, `{"sampling_params":{"max_new_tokens":null}}`, false, 0, false},
		{generateRoute, `{"sampling_params":{"beam_width":4}}`, true, 128, false},
		{generateRoute, `{"return_logprob":true,"logprob_start_len":-1}`, false, 128, false},
		{generateRoute, `{"return_logprob":true,"logprob_start_len":0}`, false, 128, true},
	} {
		body := parsed(t, test.body)
		if several, limit, anew := SeveralAnswers(test.route, body), TokenLimit(test.route, body), ComputesAnew(body); several != test.several || limit != test.limit || anew != test.anew {
			t.Errorf("%s %s: several %v, at most %d tokens, computed anew %v", test.route, test.body, several, limit, anew)
		}
	}
}

func TestLogProbabilitiesOfAnAnswer(t *testing.T) {
	for body, want := range map[string]int{
		`{}`:                                   0,
		`{"prompt_logprobs":null}`:             0,
		`{"prompt_logprobs":2}`:                200,
		`{"prompt_logprobs":-1}`:               100 * vocabulary,
		`{"prompt_logprobs":"-1"}`:             100 * vocabulary,
		`{"prompt_logprobs":1e300}`:            100 * vocabulary,
		`{"logprobs":3}`:                       30,
		`{"logprobs":true,"top_logprobs":5}`:   50,
		`{"logprobs":-1,"prompt_logprobs":-1}`: 110 * vocabulary,
	} {
		if got := Logprobs(parsed(t, body), 100, 10); got != want {
			t.Errorf("%s: %d, want %d", body, got, want)
		}
	}
}

// TestNumbersAreWhatTheEngineReads: a limit that counts less than is computed is none.
func TestNumbersAreWhatTheEngineReads(t *testing.T) {
	for _, raw := range []string{`64`, `64.0`, `6.4e1`, `"64"`, `" 64 "`, `"6_4"`, `"+64"`, `"0064"`, `"64.0"`} {
		for _, test := range []struct {
			route, body string
			read        func(string, *jsonbody.Body) int
		}{
			{chatRoute, `{"n":%s}`, Answers}, {completionRoute, `{"n":1,"best_of":%s}`, Answers}, {generateRoute, `{"sampling_params":{"n":%s}}`, Answers}, {"/inference/v1/generate", `{"sampling_params":[{"n":2},{"n":%s}]}`, Answers},
			{chatRoute, `{"max_tokens":%s}`, TokenLimit}, {chatRoute, `{"max_tokens":3,"max_completion_tokens":%s}`, TokenLimit}, {ResponsesRoute, `{"max_output_tokens":%s}`, TokenLimit}, {generateRoute, `{"sampling_params":{"max_new_tokens":%s}}`, TokenLimit},
		} {
			body, ok := jsonbody.Parse(fmt.Appendf(nil, test.body, raw))
			if got := test.read(test.route, body); !ok || got != 64 {
				t.Errorf("%s "+test.body+": %d", test.route, raw, got)
			}
			if strings.Contains(test.body, `"n"`) && !strings.Contains(test.body, `{"n":2}`) && !SeveralAnswers(test.route, body) {
				t.Errorf("%s "+test.body+": one answer", test.route, raw)
			}
		}
	}
}
