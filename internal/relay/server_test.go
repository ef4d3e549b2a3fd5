package relay

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// cell is a server over an index that a test changes.
type cell struct {
	*Server
	index  radix.Index
	models atomic.Pointer[[]Model]
	ready  atomic.Bool
	stop   func()
}

func startCell(t *testing.T, port int) *cell { return startSecureCell(t, port, nil) }

// startSecureCell serves TLS with secure, unless that is nil.
func startSecureCell(t *testing.T, port int, secure *tls.Config) *cell {
	t.Helper()
	c := &cell{}
	c.ready.Store(true)
	c.models.Store(&[]Model{{Name: "m", Base: "m", Aliases: []string{"chat"}}, {Name: "m-sql", Base: "m", Adapter: "sql"}})
	var err error
	c.Server, err = New(Settings{RelayPort: port, RelayHost: "127.0.0.1", RelayDataCenter: "here", RelayBlocks: 1 << 12, RelayTLS: secure != nil}, Deps{
		Secure: secure, BlockSize: 4, Models: func() []Model { return *c.models.Load() }, Ready: c.ready.Load,
		Load: func() (used, total uint64, observed, expected int) { return 10, 40, 1, 1 }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	c.index = c.Holdings().Follow(radix.NewTree(), 4)
	served := make(chan error, 1)
	go func() { served <- c.Serve() }() // until stop
	c.stop = sync.OnceFunc(func() {
		c.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(c.stop)
	return c
}

// store stores the blocks of tokens on a worker, with their own hashes as the engine's.
func (c *cell) store(t *testing.T, worker uint64, tokens []uint32, lora string) (engine []uint64) {
	t.Helper()
	local := kv.HashBlocks(nil, tokens, 4, lora, "")
	engine = kv.SequenceHashes(nil, local)
	var blocks []kv.StoredBlock
	for i := range local {
		blocks = append(blocks, kv.StoredBlock{Engine: engine[i], Local: local[i]})
	}
	if err := radixtest.Store(c.index, kv.WorkerKey{Worker: worker}, 0, false, blocks); err != nil {
		t.Fatal(err)
	}
	return engine
}

func followAt(t *testing.T, address string, silence time.Duration) *Client {
	t.Helper()
	c, err := NewClient(Following{Address: address, Subscriber: "test", Silence: silence, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	testkit.Background(t, c.Run)
	return c
}

func finds(t *testing.T, c *Client, blocks int, prompt Prompt) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d blocks of %+v", blocks, prompt), func() bool {
		matches, err := c.Match(&prompt)
		return err == nil && len(matches) == 1 && matches[0].Filter != nil && matches[0].Filter.Known() && matches[0].Blocks == blocks
	})
}

func TestAClientFollowsAServer(t *testing.T) {
	x := startCell(t, 0)
	engine := x.store(t, 1, upTo(8), "")
	c := followAt(t, x.Address(), 0)
	finds(t, c, 2, Prompt{Model: "m", Tokens: upTo(12)})
	finds(t, c, 2, Prompt{Model: "chat", Tokens: upTo(12)})
	finds(t, c, 0, Prompt{Model: "m-sql", Tokens: upTo(12)})
	x.store(t, 2, upTo(12), "sql")
	finds(t, c, 3, Prompt{Model: "m-sql", Tokens: upTo(12)})
	radixtest.Remove(x.index, kv.WorkerKey{Worker: 1}, engine[1:])
	finds(t, c, 1, Prompt{Model: "m", Tokens: upTo(12)})
	radixtest.Forget(x.index, 1)
	finds(t, c, 0, Prompt{Model: "m", Tokens: upTo(12)})
	testkit.Eventually(t, 20*time.Second, "load and readiness", func() bool {
		views, err := c.Pools("m-sql")
		if err != nil || len(views) != 1 {
			return false
		}
		usage, known := views[0].Load.Usage()
		return views[0].State == Ready && known && usage == 0.25
	})
	x.ready.Store(false)
	testkit.Eventually(t, 20*time.Second, "it is not ready", func() bool {
		views, _ := c.Pools("m")
		return len(views) == 1 && views[0].State == Unavailable
	})
	x.models.Store(&[]Model{})
	testkit.Eventually(t, 20*time.Second, "its pool is withdrawn", func() bool {
		views, err := c.Pools("m")
		return err == nil && len(views) == 0
	})
	testkit.Eventually(t, 20*time.Second, "its stream has ended", func() bool { return x.Holdings().Counts().Subscribers == 0 })
}

func TestAServerThatRestartsIsFollowedAnew(t *testing.T) {
	port := testkit.FreePorts(t, 1)
	x := startCell(t, port)
	x.store(t, 1, upTo(8), "")
	c := followAt(t, x.Address(), 0)
	finds(t, c, 2, Prompt{Model: "m", Tokens: upTo(12)})
	x.stop()
	testkit.Eventually(t, 20*time.Second, "nothing is known of it", func() bool {
		matches, err := c.Match(&Prompt{Model: "m", Tokens: upTo(12)})
		return err != nil && len(matches) == 0
	})
	x = startCell(t, port)
	x.store(t, 1, upTo(4), "")
	finds(t, c, 1, Prompt{Model: "m", Tokens: upTo(12)})
}

// ask sends one request and returns the error of the first answer, and its reason.
func ask(t *testing.T, address, method string, request []byte) (codes.Code, string) {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(newCodec())))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, "/"+service+"/"+method)
	if err != nil {
		t.Fatal(err)
	}
	_ = stream.SendMsg(&request)
	_ = stream.CloseSend()
	var answer []byte
	err = stream.RecvMsg(&answer)
	return status.Code(err), strings.Join(stream.Trailer().Get(reasonKey), ",")
}

func TestWrongRequestsAreRefusedWithTheContractsReasons(t *testing.T) {
	x := startCell(t, 0)
	mine := x.holdings.producer
	other, restarted := mine, mine
	other.Pool.DataCenter++
	restarted.Incarnation++
	unsupported := putMessage(putText(nil, 1, "a"), 2, []byte{0x08, 0x09})
	for _, one := range []struct {
		name, method string
		request      []byte
		code         codes.Code
		reason       string
	}{
		{"no marker", "WatchKvPoolCatalog", putText(nil, 1, "a"), codes.FailedPrecondition, "CONTRACT_MISMATCH"},
		{"no marker of a call", "GetRelayInfo", nil, codes.FailedPrecondition, "CONTRACT_MISMATCH"},
		{"no name", "SubscribeKvPoolLoad", encodeRequest("", nil), codes.InvalidArgument, "INVALID_REQUEST"},
		{"a long name", "SubscribeServingReadiness", encodeRequest(strings.Repeat("a", 129), nil), codes.InvalidArgument, "INVALID_REQUEST"},
		{"a name with a line break", "WatchKvPoolCatalog", encodeRequest("a\nb", nil), codes.InvalidArgument, "INVALID_REQUEST"},
		{"no fields", "WatchKvPoolCatalog", []byte{0xff}, codes.InvalidArgument, "INVALID_REQUEST"},
		{"no producer", "SubscribeKvPool", encodeRequest("a", nil), codes.InvalidArgument, "INVALID_REQUEST"},
		{"a producer of nothing", "SubscribeKvPool", end(unsupported), codes.InvalidArgument, "INVALID_REQUEST"},
		{"another pool", "SubscribeKvPool", encodeRequest("a", &other), codes.NotFound, "POOL_NOT_FOUND"},
		{"another generation", "SubscribeKvPool", encodeRequest("a", &restarted), codes.FailedPrecondition, "PRODUCER_CHANGED"},
		{"this generation", "SubscribeKvPool", encodeRequest("a", &mine), codes.OK, ""},
	} {
		want := ""
		if one.reason != "" {
			want = "RELAY_ERROR_REASON_" + one.reason
		}
		if code, reason := ask(t, x.Address(), one.method, one.request); code != one.code || reason != want {
			t.Errorf("%s: %v, %q: want %v, %q", one.name, code, reason, one.code, want)
		}
	}
}

// impostor answers every method with the messages of a test.
func impostor(t *testing.T, answers map[string][][]byte) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.ForceServerCodecV2(newCodec()), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(stream)
		messages, known := answers[strings.TrimPrefix(method, "/"+service+"/")]
		if !known {
			return status.Error(codes.Unimplemented, "unknown")
		}
		for _, message := range messages {
			if err := stream.SendMsg(&message); err != nil {
				return err
			}
		}
		if !strings.HasSuffix(method, "GetRelayInfo") {
			<-stream.Context().Done()
		}
		return nil
	}))
	go server.Serve(listener) // until Stop
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

func TestAWrongRelayIsNotBelieved(t *testing.T) {
	x := tell(t, producerOf(64))
	x.store(kv.WorkerKey{Worker: 1}, 0, false, []kv.StoredBlock{{Engine: 1, Local: kv.HashBlock(upTo(4), kv.HashSeed)}})
	pool := Pool{Producer: x.producer, Endpoint: Endpoint{"a", "b", "c"}, Models: []Model{{Name: "m", Base: "m"}}, BlockSize: 4, Format: Standard, Roles: []Role{Aggregated}}
	snapshot := func(relay Identity) []byte {
		return (&Update{Relay: relay, Producer: x.producer, Kind: Snapshot, Payload: encodeChunk(&x.producer, 0, x.table.words, 0)}).Encode()
	}
	info := (&Catalog{Relay: x.relay}).EncodeInfo()
	catalog := func(p ...Pool) []byte { return (&Catalog{Relay: x.relay, Revision: 1, Pools: p}).Encode() }
	changed := func(change func(p *Pool)) Pool {
		p := pool
		change(&p)
		return p
	}
	later := putMessage(putVarint(nil, 1, 2), 2, []byte{})
	for _, one := range []struct {
		name    string
		info    []byte
		catalog []byte
		stream  []byte
		model   string
		want    string // the end; empty: there is one pool that is not known
		found   bool   // the block
	}{
		{name: "a right one", found: true},
		{name: "another contract", info: []byte{}, want: "marker 0x0"},
		{name: "a later version", info: end(later), want: "version 2"},
		{name: "a catalog that is none", catalog: []byte{0xff}, want: "unexpected EOF"},
		{name: "a pool twice", catalog: catalog(pool, pool), want: "twice"},
		{name: "a pool with a hash format of later", catalog: catalog(changed(func(p *Pool) { p.Format = 9 })), want: "no pool"},
		{name: "a pool with a role of later", catalog: catalog(changed(func(p *Pool) { p.Roles = []Role{9} })), want: "no pool"},
		{name: "a pool without a role", catalog: catalog(changed(func(p *Pool) { p.Roles = nil })), want: "no pool"},
		{name: "a pool without a block size", catalog: catalog(changed(func(p *Pool) { p.BlockSize = 0 })), want: "no pool"},
		{name: "a pool of an odd size", catalog: catalog(changed(func(p *Pool) { p.Producer.Format.Buckets = 3 })), want: "no pool"},
		{name: "a pool that is too large", catalog: catalog(changed(func(p *Pool) { p.Producer.Format.Buckets = 2 * MaxBuckets })), want: "no pool"},
		{name: "a name of two models", want: "different models", catalog: catalog(pool, changed(func(p *Pool) {
			p.Producer.Pool.DataCenter++
			p.Models = []Model{{Name: "x", Base: "x", Aliases: []string{"m"}}}
		}))},
		{name: "a stream of another relay", stream: snapshot(Identity{8, 8})},
		{name: "a stream that is none", stream: []byte{0xff}},
	} {
		t.Run(one.name, func(t *testing.T) {
			answers := map[string][][]byte{"GetRelayInfo": {info}, "WatchKvPoolCatalog": {catalog(pool)}, "SubscribeKvPool": {snapshot(x.relay)}}
			for method, message := range map[string][]byte{"GetRelayInfo": one.info, "WatchKvPoolCatalog": one.catalog, "SubscribeKvPool": one.stream} {
				if message != nil {
					answers[method] = [][]byte{message}
				}
			}
			c := followAt(t, impostor(t, answers), 0)
			testkit.Eventually(t, 20*time.Second, one.want, func() bool {
				matches, err := c.Match(&Prompt{Model: "m", Tokens: upTo(4)})
				switch {
				case one.found:
					return err == nil && len(matches) == 1 && matches[0].Blocks == 1
				case one.want == "no pool":
					return err == nil && len(matches) == 0
				case one.want != "":
					return err != nil && strings.Contains(err.Error(), one.want)
				}
				return err == nil && len(matches) == 1 && matches[0].Failure != nil && matches[0].Blocks == 0
			})
		})
	}
}

// TestAFalseFilterCannotClaimEverything: each of the slots that are looked at has one fingerprint
// of 65,535, whatever all slots have.
func TestAFalseFilterCannotClaimEverything(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	p := producerOf(1 << 10)
	for name, word := range map[string]func() uint64{
		"random": random.Uint64,
		"equal":  func() uint64 { return 0x0001_0001_0001_0001 },
		"full":   func() uint64 { return ^uint64(0) },
	} {
		words := make([]uint64, p.Format.Buckets)
		for i := range words {
			words[i] = word() | 0x0001_0001_0001_0001
		}
		s := must[*Stream](t)(NewStream(p))
		if err := s.Apply(&Update{Producer: p, Kind: Snapshot, Payload: encodeChunk(&p, 0, words, 0)}); err != nil {
			t.Fatal(err)
		}
		found := 0
		const looks = 500_000
		for range looks {
			found += s.Filter().Prefix([]uint64{random.Uint64()})
		}
		if rate, stated := float64(found)/looks, s.Filter().FalsePositives(); rate > 1.5*stated || stated > 1.3e-4 {
			t.Errorf("%s: it holds %.4f %% of what nobody has named, stated are %.4f %%", name, 100*rate, 100*stated)
		}
	}
}

// TestARelayThatTellsWithoutAPauseWaits: so that it takes no more than its share of this router.
func TestARelayThatTellsWithoutAPauseWaits(t *testing.T) {
	catalog := (&Catalog{Relay: Identity{1, 2}}).Encode()
	const sent = 2 * maxStates
	all := make([][]byte, sent)
	for i := range all {
		all[i] = catalog
	}
	c := must[*Client](t)(NewClient(Following{Address: impostor(t, map[string][][]byte{"WatchKvPoolCatalog": all}), Subscriber: "test", Log: slog.New(slog.DiscardHandler)}))
	defer c.conn.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	began, read := time.Now(), 0
	err := c.receive(ctx, "WatchKvPoolCatalog", nil, 0, func([]byte) error {
		if read++; read == sent {
			return io.EOF
		}
		return nil
	})
	if took := time.Since(began); read != sent || took < 800*time.Millisecond {
		t.Errorf("%d catalogs in %v: %v", read, took, err)
	}
}

func TestASilentPoolIsEmptied(t *testing.T) {
	x := tell(t, producerOf(64))
	x.store(kv.WorkerKey{Worker: 1}, 0, false, []kv.StoredBlock{{Engine: 1, Local: kv.HashBlock(upTo(4), kv.HashSeed)}})
	pool := Pool{Producer: x.producer, Endpoint: Endpoint{"a", "b", "c"}, Models: []Model{{Name: "m", Base: "m"}}, BlockSize: 4, Format: Standard, Roles: []Role{Aggregated}}
	c := followAt(t, impostor(t, map[string][][]byte{
		"GetRelayInfo":       {(&Catalog{Relay: x.relay}).EncodeInfo()},
		"WatchKvPoolCatalog": {(&Catalog{Relay: x.relay, Pools: []Pool{pool}}).Encode()},
		"SubscribeKvPool":    {(&Update{Relay: x.relay, Producer: x.producer, Kind: Snapshot, Payload: encodeChunk(&x.producer, 0, x.table.words, 0)}).Encode()},
	}), 200*time.Millisecond)
	finds(t, c, 1, Prompt{Model: "m", Tokens: upTo(4)})
	testkit.Eventually(t, 20*time.Second, "its filter is emptied", func() bool {
		matches, err := c.Match(&Prompt{Model: "m", Tokens: upTo(4)})
		return err == nil && len(matches) == 1 && matches[0].Blocks == 0 && matches[0].Failure != nil && strings.Contains(matches[0].Failure.Error(), "no message for")
	})
}

func TestSettingsAreChecked(t *testing.T) {
	good := Settings{RelayPort: 1, RelayHost: "127.0.0.1", RelayDataCenter: "a", RelayBlocks: 1}
	if err := good.Validate(true, false); err != nil {
		t.Error(err)
	}
	if err := good.Validate(false, false); err == nil {
		t.Error("a relay of a router without KV events is accepted")
	}
	for want, change := range map[string]func(s *Settings){
		"--relay-blocks":      func(s *Settings) { s.RelayBlocks = 0 },
		"give 1 to 33554432":  func(s *Settings) { s.RelayBlocks = 1<<25 + 1 },
		"--relay-data-center": func(s *Settings) { s.RelayDataCenter = "" },
		"--relay-host":        func(s *Settings) { s.RelayHost = "" },
		"--tls-cert":          func(s *Settings) { s.RelayTLS = true },
	} {
		s := good
		change(&s)
		if err := s.Validate(true, false); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error about %s", err, want)
		}
	}
}
