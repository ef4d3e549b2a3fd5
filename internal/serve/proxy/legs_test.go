package proxy

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidwall/gjson"
	"pgregory.net/rapid"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// TestBodiesOfLegs: whatever object a client sends, its members reach the decode
// leg as they are and behind those added, and the prefill leg but for those that
// it must have otherwise.
func TestBodiesOfLegs(t *testing.T) {
	space := rapid.SampledFrom([]string{"", " ", "\n\t"})
	key := rapid.SampledFrom([]string{`"model"`, `"stream"`, `"max_tokens"`, `"max_completion_tokens"`, `"min_tokens"`, `"stream_options"`, `"return_token_ids"`, `"store"`, `"stop"`, `"stop_token_ids"`, `"stop_sequences"`, `"ignore_eos"`, `"a\"b"`, `"\u00e9"`, `""`, `"x"`})
	value := rapid.SampledFrom([]string{`1`, `null`, `true`, `"}{"`, `{"a": [1, {}]}`, `[ ]`, `18446744073709551616`, `1.50`, `"\ud800"`})
	path := rapid.SampledFrom([]string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
	rapid.Check(t, func(t *rapid.T) {
		var text strings.Builder
		text.WriteString(space.Draw(t, "before") + "{" + space.Draw(t, "inside"))
		for i := range rapid.IntRange(0, 5).Draw(t, "members") {
			if i > 0 {
				text.WriteString("," + space.Draw(t, "between"))
			}
			text.WriteString(key.Draw(t, "key") + ":" + space.Draw(t, "colon") + value.Draw(t, "value"))
		}
		text.WriteString("}" + space.Draw(t, "after"))
		client := text.String()
		body, ok := jsonbody.Parse([]byte(client))
		if !ok {
			t.Fatalf("%s is no object", client)
		}

		sent := edits{client: body}
		if rapid.Bool().Draw(t, "first") && len(body.Top) > 0 {
			sent.add(jsonbody.Field{Key: "first", Raw: "true"})
		}
		sent.add(jsonbody.Field{Key: "kv_transfer_params", Raw: `{"a":1}`}, jsonbody.Field{Key: "rid", Raw: `"r"`})
		whole := bodyOf(&sent)
		decode, ok := jsonbody.Parse([]byte(whole))
		if !ok || !strings.HasPrefix(whole, `{"kv_transfer_params":{"a":1},"rid":"r"`) || !strings.HasSuffix(whole, client[strings.Index(client, "{")+1:]) {
			t.Fatalf("%s became %s", client, whole)
		}
		if string(body.Raw) != client {
			t.Fatalf("the client's bytes became %s", body.Raw)
		}
		for _, m := range body.Top {
			if got := jsonbody.FieldOf(decode.Top, m.Key); got.Raw != m.Value.Raw {
				t.Fatalf("%s: %q became %s", client, m.Key, got.Raw)
			}
		}

		route := path.Draw(t, "path")
		leg := prefillBody(route, body, `{"p":1}`)
		prefill, ok := jsonbody.Parse(leg)
		if !ok {
			t.Fatalf("%s became %s", client, leg)
		}
		want := map[string]string{"stream": "false", "kv_transfer_params": `{"p":1}`, "min_tokens": "", "stream_options": "", "return_token_ids": "", "ignore_eos": "true", "stop": "", "stop_token_ids": "", "stop_sequences": ""}
		switch {
		case route == "/v1/responses":
			want["max_output_tokens"], want["store"], want["max_tokens"] = "1", "false", ""
		case route == "/v1/chat/completions" && body.Get("max_completion_tokens").Exists():
			want["max_completion_tokens"], want["max_tokens"] = "1", ""
		default:
			want["max_tokens"] = "1"
		}
		for _, m := range body.Top {
			if _, changed := want[m.Key]; !changed {
				want[m.Key] = m.Value.Raw
			}
		}
		for name, raw := range want {
			if got := jsonbody.FieldOf(prefill.Top, name); got.Raw != raw || (raw == "" && got.Exists()) {
				t.Fatalf("%s on %s became %s: %q should be %q", client, route, leg, name, raw)
			}
		}
	})
}

// TestThePrefillLegOfTokens has its limits where that route has them.
func TestThePrefillLegOfTokens(t *testing.T) {
	for client, want := range map[string]string{
		`{"token_ids":[1],"stream":true,"stream_options":{},"sampling_params":{"max_tokens":9,"min_tokens":3,"stop":["x"],"logprobs":1},"cache_salt":"s"}`: `{"logprobs":1,"max_tokens":1,"ignore_eos":true}`,
		`{"token_ids":[1]}`:                        `{"max_tokens":1,"ignore_eos":true}`,
		`{"token_ids":[1],"sampling_params":null}`: `{"max_tokens":1,"ignore_eos":true}`,
		`{"token_ids":[1],"sampling_params":7}`:    `{"max_tokens":1,"ignore_eos":true}`,
	} {
		body, ok := jsonbody.Parse([]byte(client))
		if !ok {
			t.Fatal(client)
		}
		leg := prefillBody(tokensRoute, body, `{"p":1}`)
		got := gjson.ParseBytes(leg)
		if !gjson.ValidBytes(leg) || got.Get("sampling_params").Raw != want || got.Get("stream").Raw != "false" || got.Get("kv_transfer_params.p").Int() != 1 ||
			got.Get("stream_options").Exists() || got.Get("max_tokens").Exists() || got.Get("token_ids").Raw != "[1]" || got.Get("cache_salt").Raw != body.Get("cache_salt").Raw {
			t.Errorf("%s became %s", client, leg)
		}
	}
	for client, want := range map[string]string{
		`{"token_ids":[1],"sampling_params":{"prompt_logprobs":1}}`: wholePrompt, `{"token_ids":[1],"sampling_params":{"n":2}}`: wholeAnswers,
		`{"token_ids":[1],"sampling_params":{"prompt_logprobs":0}}`: "", `{"token_ids":[1],"sampling_params":{"logprobs":1}}`: "",
	} {
		body, _ := jsonbody.Parse([]byte(client))
		if why, _ := WhyWhole(tokensRoute, body, false, false); why != want {
			t.Errorf("%s: %q, want %q", client, why, want)
		}
	}
}

// TestAnswersWithExpertsAreNotShared: once a worker has returned some.
func TestAnswersWithExpertsAreNotShared(t *testing.T) {
	const with, without = `{"choices":[{"routed_experts":"k05VTVBZ"}],"kv_transfer_params":{}}`, `{"choices":[{"routed_experts":null}],"kv_transfer_params":{}}`
	if !hasExperts(tokensRoute, []byte(with)) || hasExperts(tokensRoute, []byte(without)) || hasExperts(chatRoute, []byte(with)) {
		t.Error("experts of an answer")
	}
	body, _ := jsonbody.Parse([]byte(`{"token_ids":[1]}`))
	var p Proxy
	if why, _ := p.WhyWhole(tokensRoute, body, false, false); why != "" {
		t.Errorf("whole for %s before any experts", why)
	}
	p.experts.Store(true)
	if why, _ := p.WhyWhole(tokensRoute, body, false, false); why != wholeExperts {
		t.Errorf("whole for %q, want %s", why, wholeExperts)
	}
	if why, _ := p.WhyWhole(chatRoute, body, false, false); why != "" {
		t.Errorf("a chat is whole for %s", why)
	}
}

func TestRoomsHave63Bits(t *testing.T) {
	high := false
	for range 200 {
		room := newRoom(kv.Target{Ranks: 1})
		if room >= 1<<63 {
			t.Fatalf("%d", room)
		}
		high = high || room >= 1<<62
		if fields := sglangFields(kv.Bootstrap{Host: "h", Port: 1}, room); !gjson.Valid(fields[3].Raw) || gjson.Get(fields[3].Raw, "bootstrap_room").Uint() != room {
			t.Fatalf("%d is written as %s", room, fields[3].Raw)
		}
	}
	if !high {
		t.Error("200 rooms, none with its highest bit")
	}
}

// TestRoomsNameARank: SGLang gives a room to the rank that it is modulo their
// number.
func TestRoomsNameARank(t *testing.T) {
	for ranks := range 9 {
		for rank := range uint32(max(1, ranks)) {
			for range 50 {
				room := newRoom(kv.Target{Key: kv.WorkerKey{Rank: rank}, Ranks: ranks})
				if got := room % uint64(max(1, ranks)); room >= 1<<63 || got != uint64(rank) {
					t.Fatalf("rank %d of %d: room %d names rank %d", rank, ranks, room, got)
				}
			}
		}
	}
}

// BenchmarkLegs is what sending both legs at once saves: the median time from a
// shared request's arrival to its first token, with SGLang's protocol (at once) and
// NIXL's (one after the other), alternately. Each worker is a round trip away from
// the router, spent before it answers: timers are exact to 1 ms, and halves of it
// would not be. The work and the transfer between the workers take no time.
func BenchmarkLegs(b *testing.B) {
	for _, way := range []time.Duration{time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond} {
		b.Run("way="+way.String(), func(b *testing.B) {
			atOnce, inTurn := newFarPair(b, kv.KindSGLang, way), newFarPair(b, kv.KindNIXL, way)
			var once, turn, saved, ratios []float64
			for b.Loop() {
				o, t := atOnce(), inTurn()
				once, turn = append(once, o), append(turn, t)
				saved, ratios = append(saved, t-o), append(ratios, t/o)
			}
			b.ReportMetric(median(once), "at-once-p50-ms")
			b.ReportMetric(median(turn), "in-turn-p50-ms")
			b.ReportMetric(median(saved), "saved-p50-ms")
			b.ReportMetric(median(ratios), "ratio-p50")
		})
	}
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// newFarPair starts a prefill and a decode worker of a kind, each that way off, and
// returns what sends them a shared request and returns its time to first token, ms.
// One at a time.
func newFarPair(b *testing.B, kind kv.Kind, way time.Duration) func() float64 {
	met := make(chan struct{}) // SGLang's workers wait for each other
	worker := func(role kv.Role) kv.Target {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			<-time.After(way)
			if kind == kv.KindSGLang {
				select { // one leg sends, the other receives
				case met <- struct{}{}:
				case <-met:
				case <-r.Context().Done():
					return
				}
			}
			if kind == kv.KindNIXL && role == kv.RolePrefill {
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, `{"choices":[{"message":{"content":"a"},"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true}}`)
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, `data: {"choices":[{"delta":{"content":"a"}}]}`+"\n\ndata: [DONE]\n\n")
		}))
		b.Cleanup(server.Close)
		target := kv.Target{URL: server.URL, Ranks: 1, Generation: 1, Models: []string{"m"}, Disagg: kv.Disagg{Role: role, Kind: kind}}
		if role == kv.RoleDecode {
			target.Key.Worker = 1
		} else if kind == kv.KindSGLang {
			target.Bootstrap = testkit.SglangPrefill.Bootstrap
		}
		return target
	}
	r := routertest.New(b, "work", 0)
	r.Up(worker(kv.RolePrefill))
	r.Up(worker(kv.RoleDecode))
	pairs := newTestProxy(b, 0)
	body := parsed(b, `{"model":"m","stream":true,"messages":[{"role":"user","content":"Why?"}]}`)
	tokens := testkit.Tokens(1, 12)
	return func() float64 {
		u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{}, Body: body, Route: testkit.ChatPath, Paired: true}
		x, began := &Exchange{}, time.Now()
		err := pairs.Forward(b.Context(), httptest.NewRecorder(), u, x, &fleetChooser{router: r, ctx: b.Context(), request: router.Request{Tokens: tokens}})
		if err != nil || x.Shared == nil || x.FirstChunk.IsZero() {
			b.Fatalf("%+v: %v", x, err)
		}
		return float64(x.FirstChunk.Sub(began)) / float64(time.Millisecond)
	}
}

// TestAFailedDecodeLegWaitsForThePrefillLegsFailure: the decode worker may report first
// that the prefill worker is gone.
func TestAFailedDecodeLegWaitsForThePrefillLegsFailure(t *testing.T) {
	gone := errors.New("the prefill worker is gone")
	for _, test := range []struct {
		name         string
		after, waits time.Duration
		want         error
	}{
		{"which is known", 0, 0, gone},
		{"which comes a moment later", prefillGrace / 2, prefillGrace / 2, gone},
		{"which never comes", time.Hour, prefillGrace, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := make(chan error, 1)
				go func() {
					time.Sleep(test.after)
					ended <- gone
				}()
				synctest.Wait()
				began := time.Now()
				hearPrefill(ended)
				if took := time.Since(began); took != test.waits {
					t.Errorf("it waited %s, want %s", took, test.waits)
				}
				select {
				case err := <-ended:
					if err != test.want {
						t.Errorf("got %v, want %v", err, test.want)
					}
				default:
					if test.want != nil {
						t.Errorf("got nothing, want %v", test.want)
					}
				}
				time.Sleep(test.after) // the leg ends
			})
		})
	}
}
