package mocker

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/tidwall/gjson"
	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/testkit"
)

// wire is a connection to one of a worker's sockets.
type wire struct {
	t    *testing.T
	conn *zmq.Conn
}

// dial opens a connection of that kind, which ends with the test.
func dial(t *testing.T, port int, kind zmq4.SocketType, topic string) *wire {
	t.Helper()
	ctx, endpoint := t.Context(), fmt.Sprintf("tcp://127.0.0.1:%d", port)
	var conn *zmq.Conn
	var err error
	if kind == zmq4.Sub {
		conn, err = zmq.DialSub(ctx, endpoint, topic)
	} else {
		conn, err = zmq.Dial(ctx, endpoint, kind)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return &wire{t, conn}
}

// next returns the next message; ok is false if none comes within limit.
func (w *wire) next(limit time.Duration) (frames [][]byte, ok bool) {
	w.t.Helper()
	if ready, err := w.conn.Wait(time.Now().Add(limit)); err != nil || !ready {
		return nil, false
	}
	frames, err := w.conn.Recv()
	if err != nil {
		w.t.Fatal(err)
	}
	copied := make([][]byte, len(frames)) // the connection uses them again
	for i := range frames {
		copied[i] = bytes.Clone(frames[i])
	}
	return copied, true
}

// unpack decodes msgpack as a program that knows no types.
func unpack(t *testing.T, payload []byte) any {
	t.Helper()
	decoder := msgpack.NewDecoder(bytes.NewReader(payload))
	decoder.UseLooseInterfaceDecoding(true) // int64, uint64, float64
	v, err := decoder.DecodeInterface()
	if err != nil {
		t.Fatalf("%x: %v", payload, err)
	}
	return signed(v)
}

// signed has the unsigned integers in v that are also signed ones as such.
func signed(v any) any {
	switch v := v.(type) {
	case uint64:
		if v <= math.MaxInt64 {
			return int64(v)
		}
	case []any:
		for i := range v {
			v[i] = signed(v[i])
		}
	case map[string]any:
		for key := range v {
			v[key] = signed(v[key])
		}
	}
	return v
}

// replayed asks rank's ROUTER for the batches from that number on.
func replayed(t *testing.T, w *Worker, rank int, from uint64) (messages [][][]byte) {
	t.Helper()
	asker := dial(t, w.cfg.Ports.KVReplay+w.number*w.cfg.Ports.Ranks+rank, zmq4.Dealer, "")
	if err := asker.conn.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		t.Fatal(err)
	}
	for {
		frames, ok := asker.next(10 * time.Second)
		if !ok {
			t.Fatal("the replay has no end")
		}
		messages = append(messages, frames)
		if len(frames) == 4 && len(frames[1]) == 0 {
			return messages
		}
	}
}

// eventsOf are the events of replayed batches, in order.
func eventsOf(t *testing.T, messages [][][]byte) (events []map[string]any) {
	t.Helper()
	for _, frames := range messages[:len(messages)-1] {
		for _, event := range unpack(t, frames[3]).([]any)[1].([]any) {
			events = append(events, event.(map[string]any))
		}
	}
	return events
}

func TestSGLangReplayIsAsCaptured(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.DataParallelSize = 2 })
	generate := func(body string) {
		t.Helper()
		if status, answer := w.ask(t, "/generate", body); status != 200 {
			t.Fatalf("%d %s", status, answer)
		}
	}
	generate(`{"text":"` + strings.Repeat("a", 40) + `","routed_dp_rank":1,"sampling_params":{"max_new_tokens":2}}`)
	generate(`{"text":"` + strings.Repeat("a", 40) + `","routed_dp_rank":1,"sampling_params":{"max_new_tokens":2},"cache_salt":"s"}`)

	// The frames of the first batches and of the end are those that a DEALER got from
	// the real server; of the payloads the start was kept.
	line := regexp.MustCompile(`DEALER 4 \['', '([0-9a-f]*)', '([0-9a-f]{16})', (\d+)\] (.*)`)
	var messages [][][]byte
	testkit.Eventually(t, 10*time.Second, "all published", func() bool { messages = replayed(t, w, 1, 0); return len(messages) == 4 })
	lines := strings.Split(strings.TrimSpace(captured(t, "replay.txt")), "\n")
	lines = append(lines[2:5], lines[len(lines)-1]) // after two of another socket
	for i, frames := range messages {
		want := line.FindStringSubmatch(lines[i])
		if len(frames) != 4 || len(frames[0]) > 0 || hex.EncodeToString(frames[1]) != want[1] || hex.EncodeToString(frames[2]) != want[2] || (len(frames[3]) == 0) != (want[3] == "0") {
			t.Errorf("message %d: %x, captured %s", i, frames, lines[i])
		}
		if len(frames[3]) == 0 {
			continue
		}
		batch := unpack(t, frames[3]).([]any)
		if at, isTime := batch[0].(float64); len(batch) != 3 || !isTime || math.Abs(at-float64(time.Now().Unix())) > 60 || batch[2] != int64(1) {
			t.Errorf("message %d: %v", i, batch)
		}
		// Fields come in the same order; none of the captured ones is missing.
		last := -1
		for _, name := range regexp.MustCompile(`"([a-z_]+)":`).FindAllStringSubmatch(want[4], -1) {
			at := bytes.Index(frames[3], append([]byte{0xa0 | byte(len(name[1]))}, name[1]...))
			if at <= last {
				t.Errorf("message %d: %s is not where it should be in %q", i, name[1], frames[3])
			}
			last = at
		}
	}
	ids := make([]any, 32)
	for i := range ids {
		ids[i] = int64('a')
	}
	events := eventsOf(t, messages)
	for i, want := range []map[string]any{
		{"type": "AllBlocksCleared"},
		{"type": "BlockStored", "parent_block_hash": nil, "token_ids": ids, "block_size": int64(16), "lora_id": nil, "medium": "GPU"},
		{"type": "BlockStored", "parent_block_hash": nil, "token_ids": ids, "block_size": int64(16), "lora_id": nil, "medium": "GPU", "cache_salt": "s"},
	} {
		got := events[i]
		if hashes, has := got["block_hashes"].([]any); has && len(hashes) == 2 {
			for _, hash := range hashes {
				if _, signed := hash.(int64); !signed {
					t.Errorf("hash %v is no int64", hash)
				}
			}
		} else if i > 0 {
			t.Errorf("event %d: %v", i, got)
		}
		delete(got, "block_hashes")
		if !reflect.DeepEqual(got, want) {
			t.Errorf("event %d\ngot  %v\nwant %v", i, got, want)
		}
	}
}

func TestSGLangEventsSayWhatTheCacheHas(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.NumGPUBlocks, s.Lora = 20, []string{"sql"} })
	steps := 0
	events := func() (list []map[string]any) { // since the last call
		t.Helper()
		testkit.Eventually(t, 10*time.Second, "all published", func() bool {
			batches := replayed(t, w, 0, 0)
			list = eventsOf(t, batches)
			return len(batches) > 1 && uint64(len(batches)-1) == w.Ranks[0].Events.Added.Load()
		})
		fresh := list[steps:]
		steps = len(list)
		return fresh
	}
	generate := func(text string, output int, more string) (answer string) {
		t.Helper()
		status, answer := w.ask(t, "/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}%s}`, text, output, more))
		if status != 200 {
			t.Fatalf("%d %s", status, answer)
		}
		testkit.Eventually(t, 10*time.Second, "idle", func() bool { return w.Ranks[0].CurrentLoad() == Load{} })
		return answer
	}
	hashesOf := func(event map[string]any) string { return fmt.Sprint(event["block_hashes"]) }
	events()

	// A prompt's blocks come at the end of prefill, those of the answer at its end:
	// 40 and 30 tokens, the last of which was never computed.
	generate(strings.Repeat("a", 40), 30, "")
	stored := events()
	if len(stored) != 2 || len(stored[0]["token_ids"].([]any)) != 32 || len(stored[1]["token_ids"].([]any)) != 32 ||
		stored[1]["parent_block_hash"] != stored[0]["block_hashes"].([]any)[1] {
		t.Fatalf("%v", stored)
	}
	// With an extra_key the same hashes are sent again, and removed again.
	generate(strings.Repeat("a", 40), 1, `,"extra_key":"k"`)
	again := events()
	if len(again) != 1 || hashesOf(again[0]) != hashesOf(stored[0]) {
		t.Errorf("%v, without the key %v", again, stored[0])
	}
	generate(strings.Repeat("a", 60), 1, `,"extra_key":"k"`)
	if more := events(); len(more) != 1 || more[0]["parent_block_hash"] != stored[0]["block_hashes"].([]any)[1] {
		t.Errorf("%v", more)
	}
	// A salt and an adapter change them.
	generate(strings.Repeat("a", 40), 1, `,"cache_salt":"s"`)
	if salted := events(); len(salted) != 1 || hashesOf(salted[0]) == hashesOf(stored[0]) || salted[0]["cache_salt"] != "s" {
		t.Errorf("%v", salted)
	}
	generate(strings.Repeat("a", 40), 1, `,"lora_path":"sql"`)
	if other := events(); len(other) != 1 || hashesOf(other[0]) == hashesOf(stored[0]) || other[0]["lora_name"] != "sql" || other[0]["lora_id"] != nil {
		t.Errorf("%v", other)
	}
	// 4 + 3 + 2 + 2 blocks are cached of 20: what fills 15 more evicts 6.
	generate(strings.Repeat("b", 230), 1, "")
	var removed []any
	for _, event := range events() {
		if event["type"] == "BlockRemoved" {
			if len(event) != 3 || event["medium"] != "GPU" {
				t.Errorf("%v", event)
			}
			removed = append(removed, event["block_hashes"].([]any)...)
		}
	}
	if len(removed) != 6 {
		t.Errorf("%d removed: %v", len(removed), removed)
	}
	seen := map[any]int{}
	for _, hash := range removed {
		seen[hash]++
	}
	for _, hash := range stored[0]["block_hashes"].([]any) {
		if seen[hash] == 0 {
			t.Errorf("%v was not told as removed", hash)
		}
	}
	if status, _ := w.ask(t, "/flush_cache", "{}"); status != 200 {
		t.Errorf("flush: %d", status)
	}
	if last := events(); len(last) != 1 || !reflect.DeepEqual(last[0], map[string]any{"type": "AllBlocksCleared"}) {
		t.Errorf("%v", last)
	}
}

func TestSGLangEventsAndLoadArePublished(t *testing.T) {
	w := testWorker(t, func(s *Settings) { s.DataParallelSize, s.SpeedupRatio, s.MaxNumSeqs = 2, 1, 1 })
	events := dial(t, w.cfg.Ports.KVEvents+1, zmq4.Sub, "kv-events")
	loads := dial(t, w.cfg.Ports.Load+1, zmq4.Sub, "load")
	stat := func(what string, holds func(v []any) bool) []any {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
			frames, ok := loads.next(3 * time.Second)
			if !ok || len(frames) != 3 || string(frames[0]) != "load" || len(frames[1]) != 8 {
				t.Fatalf("%q", frames)
			}
			v := unpack(t, frames[2]).([]any)
			if len(v) != 11 || v[0] != "LoadStat" || v[4] != int64(8192) || v[5] != int64(1) || v[8] != int64(1) {
				t.Fatalf("%v", v)
			}
			if holds(v) {
				return v
			}
		}
		t.Fatal("never: " + what)
		return nil
	}
	stat("idle", func(v []any) bool {
		return v[1] == int64(0) && v[2] == int64(0) && v[3] == int64(0) && v[9] == int64(0)
	})
	ctx, leave := context.WithCancel(t.Context())
	ended := make(chan int, 2)
	for i := range 2 {
		go func() {
			status, _ := w.askWith(t, ctx, "/generate", fmt.Sprintf(`{"text":"%s","routed_dp_rank":1,"sampling_params":{"max_new_tokens":2000,"ignore_eos":true}}`, strings.Repeat(fmt.Sprint(i), 50)))
			ended <- status
		}()
	}
	busy := stat("one runs, one waits", func(v []any) bool { return v[1] == int64(1) && v[2] == int64(1) && v[9] == int64(50) })
	if used, uncached, all := busy[3].(int64), busy[6].(int64), busy[7].(int64); used < 64 || used%16 != 0 || uncached != 50 || all != used+50 || busy[10].(int64) < 15_000 {
		t.Errorf("%v", busy)
	}
	leave()
	<-ended
	<-ended
	stat("idle again", func(v []any) bool { return v[1] == int64(0) && v[2] == int64(0) && v[3] == int64(0) })
	frames, ok := events.next(5 * time.Second)
	if ok && binary.BigEndian.Uint64(frames[1]) == 0 { // that it is empty; who comes later misses it
		frames, ok = events.next(5 * time.Second)
	}
	if !ok || len(frames) != 3 || string(frames[0]) != "kv-events" || binary.BigEndian.Uint64(frames[1]) == 0 {
		t.Errorf("%q", frames)
	}
	// Without a change it comes once a second.
	began := time.Now()
	first, _ := loads.next(3 * time.Second)
	second, ok := loads.next(3 * time.Second)
	if took := time.Since(began); !ok || took < 500*time.Millisecond || binary.BigEndian.Uint64(second[1]) != binary.BigEndian.Uint64(first[1])+1 || !bytes.Equal(first[2], second[2]) {
		t.Errorf("after %s %q and %q", took, first, second)
	}
}

// testPair starts a prefill and a decode worker.
func testPair(t *testing.T, tweak func(*Settings)) (prefill, decode *Worker) {
	t.Helper()
	pair := testWorkers(t, 2, func(s *Settings) {
		s.Parts = []kv.Disagg{{Role: kv.RolePrefill, Kind: s.DisaggKind()}, {Role: kv.RoleDecode, Kind: s.DisaggKind()}}
		if tweak != nil {
			tweak(s)
		}
	})
	return pair[0], pair[1]
}

// legs sends a request to both workers of a pair.
func legs(t *testing.T, ctx context.Context, prefill, decode *Worker, path, body string) (status [2]int, answers [2]string) {
	t.Helper()
	body = fmt.Sprintf(`%s,"bootstrap_host":"127.0.0.1","bootstrap_port":%d}`, strings.TrimSuffix(body, "}"), prefill.part.Bootstrap.Port)
	done := make(chan struct{})
	go func() {
		status[0], answers[0] = prefill.askWith(t, ctx, path, body)
		close(done)
	}()
	status[1], answers[1] = decode.askWith(t, ctx, path, body)
	<-done
	return status, answers
}

func TestSGLangPairHandsPromptsOver(t *testing.T) {
	prefill, decode := testPair(t, nil)
	for w, mode := range map[*Worker]string{prefill: "prefill", decode: "decode"} {
		_, info := w.ask(t, "/server_info", "")
		if gjson.Get(info, "disaggregation_mode").Str != mode {
			t.Errorf("%s", info)
		}
		status, answer := w.ask(t, "/v1/completions", `{"prompt":"x"}`)
		if status != 400 || !strings.Contains(gjson.Get(answer, "message").Str, "Disaggregated request received without bootstrap room id") {
			t.Errorf("%s without a room: %d %s", mode, status, answer)
		}
		if status, answer := w.ask(t, "/generate", `{"text":"x"}`); status != 400 || !gjson.Get(answer, "error.message").Exists() {
			t.Errorf("%s without a room: %d %s", mode, status, answer)
		}
	}
	if _, info := prefill.ask(t, "/server_info", ""); gjson.Get(info, "disaggregation_bootstrap_port").Int() != int64(prefill.part.Bootstrap.Port) {
		t.Errorf("%s", info)
	}
	text := strings.Repeat("p", 100)
	for i, want := range []int64{0, 96} {
		status, answers := legs(t, t.Context(), prefill, decode, "/generate", fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":7},"bootstrap_room":%d}`, text, 10+i))
		if status != [2]int{200, 200} || gjson.Get(answers[0], "meta_info.completion_tokens").Int() != 1 || gjson.Get(answers[1], "meta_info.completion_tokens").Int() != 7 {
			t.Errorf("%v %s", status, answers)
		}
		for _, answer := range answers {
			if gjson.Get(answer, "meta_info.cached_tokens").Int() != want {
				t.Errorf("request %d: %s", i, answer)
			}
		}
	}
	// Several prompts follow one another in their rooms, also where those are listed.
	for _, rooms := range []string{"20", "[31,40]"} {
		status, answers := legs(t, t.Context(), prefill, decode, "/v1/completions", fmt.Sprintf(`{"prompt":[%q,"other"],"max_tokens":3,"bootstrap_room":%s}`, text, rooms))
		if status != [2]int{200, 200} || gjson.Get(answers[1], "usage.completion_tokens").Int() != 6 || gjson.Get(answers[0], "usage.completion_tokens").Int() != 2 {
			t.Errorf("%v %s", status, answers)
		}
	}
	if n := len(eventsOf(t, replayed(t, decode, 0, 0))); n != 1 {
		t.Errorf("the decode worker has published %d events, want only that it is empty", n)
	}
	if n := prefill.Transfers(); n > 0 {
		t.Errorf("%d rooms are left", n)
	}
}

func TestSGLangPairHangsWithSeveralChoices(t *testing.T) {
	prefill, decode := testPair(t, nil)
	ctx, leave := context.WithCancel(t.Context())
	body := fmt.Sprintf(`{"prompt":"x","n":2,"max_tokens":3,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":1}`, prefill.part.Bootstrap.Port)
	answered := make(chan int, 1)
	go func() {
		status, _ := decode.askWith(t, ctx, "/v1/completions", body)
		answered <- status
	}()
	if status, answer := prefill.ask(t, "/v1/completions", body); status != 200 || gjson.Get(answer, "choices.#").Int() != 2 {
		t.Errorf("prefill: %d %s", status, answer)
	}
	testkit.Eventually(t, 5*time.Second, "the decode leg is there", func() bool {
		return decode.Running() > 0
	})
	select {
	case status := <-answered:
		t.Errorf("the decode leg was answered: %d", status)
	case <-time.After(300 * time.Millisecond):
	}
	leave()
	if status := <-answered; status != 0 {
		t.Errorf("%d", status)
	}
	testkit.Eventually(t, 5*time.Second, "the decode leg is gone", func() bool {
		return decode.Running() == 0
	})
}

func TestSGLangPairAbortsAndFails(t *testing.T) {
	prefill, decode := testPair(t, nil)
	// A prefill leg whose decode leg never comes can be aborted.
	answered := make(chan string, 1)
	go func() {
		_, answer := prefill.ask(t, "/generate", `{"text":"x","rid":"lonely","bootstrap_room":1}`)
		answered <- answer
	}()
	testkit.Eventually(t, 5*time.Second, "aborted", func() bool {
		prefill.ask(t, "/abort_request", `{"rid":"lonely"}`)
		return len(answered) > 0
	})
	if answer := <-answered; gjson.Get(answer, "meta_info.finish_reason.type").Str != "abort" {
		t.Errorf("%s", answer)
	}
	// Without its prefill worker a decode leg ends with 500.
	prefill.End(ErrMockCrash)
	testkit.Eventually(t, 5*time.Second, "the prefill worker has ended", func() bool {
		_, err := http.Get(prefill.url("/health"))
		return err != nil
	})
	status, answer := decode.ask(t, "/v1/completions", fmt.Sprintf(`{"prompt":"x","bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":2}`, prefill.part.Bootstrap.Port))
	if status != 500 || gjson.Get(answer, "type").Str != "500" || !strings.Contains(gjson.Get(answer, "message").Str, "Decode transfer failed") {
		t.Errorf("%d %s", status, answer)
	}
}
