package replica

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// dynamoRouter is the id of the service that the golden messages are of.
const dynamoRouter = 7300884374647567085

// golden reads the messages that Dynamo sent, by name.
func golden(t testing.TB) map[string][]byte {
	t.Helper()
	file, err := os.Open("testdata/dynamo.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	messages := map[string][]byte{}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) == 3 && fields[0] != "#" {
			if messages[fields[0]], err = hex.DecodeString(fields[2]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return messages
}

// dynamoChange is a change of a golden message.
func dynamoChange(kind, request, lora string, sequence []uint64, expected int) decoded {
	c := router.Change{Kind: kind, Request: request, Worker: kv.WorkerKey{Worker: 1}, LoRA: lora, BlockSize: 4}
	if kind == router.ChangeAdd {
		c.Tokens, c.Uncached, c.Expected, c.Sequence = 10, 10, expected, sequence
	}
	return decoded{dynamoRouter, c}
}

var (
	plainSequence = []uint64{14643705804678351452, 4945711292740353085}
	loraSequence  = []uint64{16365837591317883983, 16946037565811800226}
	dynamoChanges = map[string]decoded{
		"add":       dynamoChange(router.ChangeAdd, "res-1", "", plainSequence, 32),
		"prefill":   dynamoChange(router.ChangePrefill, "res-1", "", nil, 0),
		"free":      dynamoChange(router.ChangeFree, "res-1", "", nil, 0),
		"add-lora":  dynamoChange(router.ChangeAdd, "res-2", "ad", loraSequence, 0),
		"free-lora": dynamoChange(router.ChangeFree, "res-2", "ad", nil, 0),
	}
	dynamoSession = router.SessionBinding{ID: "sess", Worker: kv.WorkerKey{Worker: 1}, Sequence: 1795447094614666432, Writer: dynamoRouter}
)

func TestWhatDynamoSendsIsRead(t *testing.T) {
	messages := golden(t)
	for name, want := range dynamoChanges {
		got, err := decodeSlot(messages[name])
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, want)
		}
	}
	if got, err := decodeSession(messages["session"]); err != nil || got != dynamoSession {
		t.Errorf("%+v, %v; want %+v", got, err, dynamoSession)
	}
}

// TestWhatIsSentIsWhatDynamoSends encodes what the golden messages say: every byte is
// the same, but for the detail of a kvrouter that stands behind.
func TestWhatIsSentIsWhatDynamoSends(t *testing.T) {
	messages := golden(t)
	for name, d := range dynamoChanges {
		event := slotEvent{Model: "m", Group: "default", BlockSize: 4, Event: slotOf(d.change, d.change.Request, d.router)}
		if got := encode(&event); !bytes.Equal(got, messages[name]) {
			t.Errorf("%s:\n%x\nwant\n%x", name, got, messages[name])
		}
		event.Detail = detailOf(d.change)
		got := encode(&event)
		if got[0] != messages[name][0]+1 || !bytes.HasPrefix(got[1:], messages[name][1:]) {
			t.Errorf("%s with its detail:\n%x", name, got)
		}
	}
	rank := uint32(0)
	if got := encode(&sessionEvent{"m", "default", "sess", 1, &rank, dynamoSession.Sequence, dynamoRouter}); !bytes.Equal(got, messages["session"]) {
		t.Errorf("session: %x", got)
	}
}

func TestKvroutersTellEachOtherAllOfABooking(t *testing.T) {
	for _, c := range []router.Change{
		{Kind: router.ChangeAdd, Request: "a", Worker: kv.WorkerKey{Worker: math.MaxUint64, Rank: math.MaxUint32}, Tokens: 1 << 20, Uncached: 70_000, Loads: kv.TierTokens{Host: 900_000, External: 64}, Expected: 9, AnsweredWhole: true, Leg: kv.LegPrefill, Sequence: []uint64{0, 127, 128, 1 << 40}},
		{Kind: router.ChangeAdd, Request: "b", Worker: kv.WorkerKey{Worker: 1}, Tokens: 300, Uncached: 300, Leg: kv.LegDecode, LoRA: "sql"},
		{Kind: router.ChangeAdd, Request: "c"},
		{Kind: router.ChangeFree, Request: strings.Repeat("d", idLimit)},
	} {
		c.BlockSize = 64
		event := slotEvent{Model: "m", Group: "g", BlockSize: 64, Event: slotOf(c, c.Request, 5)}
		if c.Kind == router.ChangeAdd {
			event.Detail = detailOf(c)
		}
		got, err := decodeSlot(encode(&event))
		if want := (decoded{5, c}); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
	for _, m := range []ownMessage{
		{Router: 5, Kind: kindDigest},
		{Router: 5, Kind: kindDigest, Sums: make([]uint64, buckets)},
		{Router: 5, Kind: kindDigest, Service: []tenantService{{"", "standard", 0, 1}, {"a", "batch", math.MaxUint64, 0}}},
		{Router: 5, Kind: kindAsk, Of: 6, Buckets: 1 << 63},
		{Router: 5, Kind: kindHeld, Bucket: 63, Requests: []string{"a", "b"}},
		{Router: 5, Kind: kindEjection, Worker: &rank{1, 2}, Milliseconds: 5000},
		{Router: 5, Kind: kindStored, Worker: &rank{1, 0}, Requests: []string{"resp_1"}},
		{Router: 5, Kind: kindStored, Worker: &rank{1, 0}, Requests: []string{"resp_1"}, Owner: math.MaxUint64},
	} {
		if got, err := decodeOwn(encode(&m)); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%+v, %v; want %+v", got, err, m)
		}
	}
}

// pack encodes a map for a test.
func pack(t testing.TB, what any) []byte {
	t.Helper()
	text, err := msgpack.Marshal(what)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

type fields = map[string]any

// slotMessage is a message of SlotTopic with something changed in each part.
func slotMessage(t testing.TB, outer, event fields) []byte {
	t.Helper()
	e := fields{"request_id": "r", "worker": fields{"worker_id": 1, "dp_rank": 0}, "data": "Free", "router_id": 9, "lora_name": nil}
	for name, value := range event {
		e[name] = value
	}
	o := fields{"model_name": "m", "routing_group": "default", "block_size": testkit.BlockSize, "event": e}
	for name, value := range outer {
		o[name] = value
	}
	return pack(t, o)
}

func TestMessagesWithoutTheirShapeAreRefused(t *testing.T) {
	if d, err := decodeSlot(slotMessage(t, fields{"novel": []any{1, fields{"a": 2}}}, fields{"novel": 3})); err != nil || d.change.Kind != router.ChangeFree || d.router != 9 {
		t.Fatalf("%+v, %v", d, err)
	}
	deep := append(bytes.Repeat([]byte{0x91}, 1<<20), 0xc0)
	for name, text := range map[string][]byte{
		"nothing": nil, "no map": {0x90}, "nil": {0xc0}, "only nesting": deep, "a count without content": {0xdf, 0xff, 0xff, 0xff, 0xff},
		"cut short":             slotMessage(t, nil, nil)[:40],
		"no event":              pack(t, fields{"block_size": 4}),
		"an unknown change":     slotMessage(t, nil, fields{"data": "Novel"}),
		"an unknown map":        slotMessage(t, nil, fields{"data": fields{"Novel": fields{}}}),
		"an empty map":          slotMessage(t, nil, fields{"data": fields{}}),
		"no request":            slotMessage(t, nil, fields{"request_id": ""}),
		"a long request":        slotMessage(t, nil, fields{"request_id": strings.Repeat("x", idLimit+1)}),
		"a request that counts": slotMessage(t, nil, fields{"request_id": 7}),
		"a negative worker":     slotMessage(t, nil, fields{"worker": fields{"worker_id": -1, "dp_rank": 0}}),
		"half a worker":         slotMessage(t, nil, fields{"worker": fields{"worker_id": 1}}),
		"a rank too high":       slotMessage(t, nil, fields{"worker": fields{"worker_id": 1, "dp_rank": uint64(1) << 32}}),
		"a router in text":      slotMessage(t, nil, fields{"router_id": "9"}),
		"broken block size":     slotMessage(t, fields{"block_size": 0.5}, nil),
		"a leg too many":        slotMessage(t, fields{"kvrouter": fields{"leg": 3}}, fields{"data": fields{"AddRequest": fields{}}}),
		"hashes in text":        slotMessage(t, nil, fields{"data": fields{"AddRequest": fields{"token_sequence": "abc"}}}),
		"hashes without end":    slotMessage(t, nil, fields{"data": fields{"AddRequest": fields{"token_sequence": msgpack.RawMessage(append(binary.BigEndian.AppendUint32([]byte{0xdd}, sequenceLimit+1), make([]byte, sequenceLimit+1)...))}}}),
	} {
		if d, err := decodeSlot(text); err == nil {
			t.Errorf("%s: %+v", name, d)
		}
	}
	for name, text := range map[string][]byte{
		"no router": pack(t, fields{"kind": kindDigest}), "no kind": pack(t, fields{"router_id": 1}), "few sums": pack(t, fields{"router_id": 1, "kind": kindDigest, "sums": []uint64{1}}),
		"no worker": pack(t, fields{"router_id": 1, "kind": kindEjection}), "no worker of a response": pack(t, fields{"router_id": 1, "kind": kindStored, "requests": []string{"a"}}), "a long response": pack(t, fields{"router_id": 1, "kind": kindStored, "worker": fields{"worker_id": 1, "dp_rank": 0}, "requests": []string{strings.Repeat("x", idLimit+1)}}), "a tenant's long name": pack(t, fields{"router_id": 1, "kind": kindDigest, "service": []fields{{"tenant": strings.Repeat("x", idLimit+1)}}}), "a negative service": pack(t, fields{"router_id": 1, "kind": kindDigest, "service": []fields{{"received": -1}}}), "services without end": pack(t, fields{"router_id": 1, "kind": kindDigest, "service": make([]fields, fair.MostReported+1)}), "a bucket too many": pack(t, fields{"router_id": 1, "kind": kindHeld, "bucket": buckets}),
		"for ever": pack(t, fields{"router_id": 1, "kind": kindEjection, "worker": fields{"worker_id": 1, "dp_rank": 0}, "milliseconds": uint64(math.MaxUint64)}),
	} {
		if m, err := decodeOwn(text); err == nil {
			t.Errorf("%s: %+v", name, m)
		}
	}
	session := fields{"session_id": "s", "worker_id": 1, "dp_rank": nil, "sequence": 1, "writer_id": 2}
	if b, err := decodeSession(pack(t, session)); err != nil || !b.AnyRank {
		t.Errorf("%+v, %v", b, err)
	}
	for name := range session {
		less := fields{}
		for other, value := range session {
			if other != name {
				less[other] = value
			}
		}
		if b, err := decodeSession(pack(t, less)); err == nil {
			t.Errorf("without %s: %+v", name, b)
		}
	}
}

// FuzzTake takes any bytes as a message of another router. Afterwards the books are
// right, and a request is routed.
func FuzzTake(f *testing.F) {
	for name, text := range golden(f) {
		topic := SlotTopic
		if name == "session" {
			topic = SessionTopic
		}
		f.Add(topic, text)
	}
	f.Add(SlotTopic, slotMessage(f, fields{"kvrouter": fields{"prompt_tokens": uint64(1) << 62, "prefill_tokens": uint64(1) << 62}}, fields{"data": fields{"AddRequest": fields{}}}))
	f.Add(SlotTopic, slotMessage(f, fields{"kvrouter": fields{"prompt_tokens": 100, "prefill_tokens": 60, "leg": 2, "answered_whole": true}}, fields{"data": fields{"AddRequest": fields{"token_sequence": []uint64{1, 2}}}}))
	f.Add(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindDigest, Sums: make([]uint64, buckets)}))
	f.Add(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindDigest, Service: []tenantService{{"own", "standard", 1 << 60, 1 << 60}, {"own", "later", 1, 1}}}))
	f.Add(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindAsk, Of: 1, Buckets: 5}))
	f.Add(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindHeld, Requests: []string{"r"}}))
	f.Add(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindRecall, Of: 1}))
	f.Add(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindLeave}))
	f.Add(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindEjection, Worker: &rank{1, 0}, Milliseconds: 1 << 40}))
	f.Fuzz(func(t *testing.T, topic string, text []byte) {
		rt := routertest.New(t, "work", 2, routertest.WithSettings(func(s *router.Settings) {
			s.SessionHeader, s.RouterQueuePolicy, s.RouterQueueTimeout = "x-session-id", "fair", time.Millisecond
		}))
		p := newOther(testMesh(rt))
		for range 2 {
			_ = p.message(topic, text)
			_ = p.message(SlotTopic, slotMessage(t, nil, fields{"request_id": "own", "data": fields{"AddRequest": fields{}}}))
			if err := p.check(); err != nil {
				t.Fatal(err)
			}
			if err := rt.Check(); err != nil {
				t.Fatal(err)
			}
		}
		d, err := rt.Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 5)})
		switch {
		case err == nil:
			d.Booking.End()
		case !errors.Is(err, router.ErrQueueTimeout): // the other router may have filled all workers
			t.Fatal(err)
		}
		p.forget()
		for worker := range uint64(2) {
			if load := rt.Load(kv.WorkerKey{Worker: worker}); load.InFlight != 0 || load.PrefillTokens != 0 || load.ContextTokens != 0 {
				t.Errorf("worker %d in the end: %+v", worker, load)
			}
		}
		if p.mesh.Held.Load() != 0 || p.hashes != 0 || p.sums != (sums{}) {
			t.Errorf("%d held, %d hashes in the end", p.mesh.Held.Load(), p.hashes)
		}
	})
}
