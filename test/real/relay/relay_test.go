// Package relay has the tests of the relay's contract against Dynamo's own relay.
package relay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"

	"kvrouter/internal/kv"
	"kvrouter/internal/relay"
	"kvrouter/internal/testkit"
)

const blockSize = 4

// dynamo is a relay of Dynamo's with one worker.
type dynamo struct {
	*testing.T
	address string
	in      io.WriteCloser
	out     *bufio.Reader
}

// startDynamo starts cell.py with the Python that KVROUTER_DYNAMO_PYTHON names.
func startDynamo(t *testing.T) *dynamo {
	t.Helper()
	python, model := os.Getenv("KVROUTER_DYNAMO_PYTHON"), os.Getenv("KVROUTER_DYNAMO_MODEL")
	if python == "" || model == "" {
		t.Skip("needs Dynamo's relay: run it with `make test-relay`")
	}
	d := &dynamo{T: t, address: fmt.Sprintf("127.0.0.1:%d", testkit.FreePorts(t, 1))}
	command := exec.Command(python, "cell.py", d.address, fmt.Sprint(blockSize), model)
	command.Env = append(os.Environ(), "DYN_TCP_RPC_HOST=127.0.0.1", "DYN_EVENT_PLANE_HOST=127.0.0.1", "DYN_SELF_HOST_METADATA=0", "PYTHONDONTWRITEBYTECODE=1", "HOME="+t.TempDir(), "DYN_LOG=warn")
	log := &testkit.LogBuffer{}
	command.Stderr, command.WaitDelay = log, 5*time.Second
	var err error
	if d.in, err = command.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	d.out = bufio.NewReader(out)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.in.Close()
		late := time.AfterFunc(20*time.Second, func() { _ = command.Process.Kill() })
		defer late.Stop()
		_, _ = io.Copy(io.Discard, d.out)
		_ = command.Wait()
		if t.Failed() {
			t.Logf("end of its log:\n%s", log.Tail())
		}
	})
	d.answer("ready")
	return d
}

// answer reads the answer to a command. Dynamo logs to the same pipe, in lines that are not
// JSON.
func (d *dynamo) answer(what string) json.RawMessage {
	d.Helper()
	for {
		line, err := d.out.ReadBytes('\n')
		if err != nil {
			d.Fatalf("%s: %v", what, err)
		}
		if json.Valid(line) {
			return line
		}
	}
}

func (d *dynamo) do(command ...any) json.RawMessage {
	d.Helper()
	line, err := json.Marshal(command)
	if err != nil {
		d.Fatal(err)
	}
	if _, err := d.in.Write(append(line, '\n')); err != nil {
		d.Fatal(err)
	}
	return d.answer(string(line))
}

// stored stores blocks behind a parent, nil for a prompt's first.
func (d *dynamo) stored(tokens []uint32, engine []int64, parent any) {
	d.Helper()
	d.do("stored", tokens, engine, parent, nil, nil)
}

// raw is a stream of a relay's messages as they are: those of an empty type keep all their
// fields as unknown ones.
type raw struct {
	*testing.T
	stream grpc.ClientStream
}

// subscribe opens a stream. producer is nil but for SubscribeKvPool.
func (d *dynamo) subscribe(method string, producer []byte) raw {
	d.Helper()
	conn, err := grpc.NewClient("passthrough:///"+d.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		d.Fatal(err)
	}
	d.Cleanup(func() { conn.Close() })
	stream, err := conn.NewStream(d.Context(), &grpc.StreamDesc{ServerStreams: true}, "/dynamo.kvrelay.v1.KvEventRelay/"+method)
	if err != nil {
		d.Fatal(err)
	}
	var fields []byte
	if method != "GetRelayInfo" {
		fields = protowire.AppendString(protowire.AppendTag(fields, 1, protowire.BytesType), "test")
	}
	if producer != nil {
		fields = protowire.AppendBytes(protowire.AppendTag(fields, 2, protowire.BytesType), producer)
	}
	fields = protowire.AppendFixed32(protowire.AppendTag(fields, 127, protowire.Fixed32Type), 0x4B565231)
	request := &emptypb.Empty{}
	request.ProtoReflect().SetUnknown(fields)
	if err := errors.Join(stream.SendMsg(request), stream.CloseSend()); err != nil {
		d.Fatal(err)
	}
	return raw{d.T, stream}
}

func (r raw) next() []byte {
	r.Helper()
	message := &emptypb.Empty{}
	if err := r.stream.RecvMsg(message); err != nil {
		r.Fatalf("%v, %v", err, r.stream.Trailer())
	}
	return message.ProtoReflect().GetUnknown()
}

// follow starts a client.
func (d *dynamo) follow() *relay.Client {
	d.Helper()
	c, err := relay.NewClient(relay.Following{Address: d.address, Subscriber: "kvrouter-test", Silence: 5 * time.Second, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		d.Fatal(err)
	}
	testkit.Background(d, c.Run)
	return c
}

// holds waits until the pool is said to hold that many blocks of a prompt.
func (d *dynamo) holds(c *relay.Client, want int, prompt relay.Prompt) {
	d.Helper()
	var matches []relay.Match
	var err error
	testkit.Eventually(d.T, 30*time.Second, fmt.Sprintf("%d blocks of %+v", want, prompt), func() bool {
		matches, err = c.Match(&prompt)
		return err == nil && len(matches) == 1 && matches[0].Filter != nil && matches[0].Filter.Known() && matches[0].Blocks == want
	})
}

func tokens(from, to uint32) (list []uint32) {
	for ; from <= to; from++ {
		list = append(list, from)
	}
	return list
}

// TestDynamoTellsItsBlocks follows Dynamo's relay while its worker stores and removes
// blocks, of the model, of an adapter and with a salt.
func TestDynamoTellsItsBlocks(t *testing.T) {
	d := startDynamo(t)
	d.stored(tokens(1, 8), []int64{11, 12}, nil)
	c := d.follow()
	d.holds(c, 2, relay.Prompt{Model: "m", Tokens: tokens(1, 14)})
	d.stored(tokens(9, 12), []int64{13}, 12)
	d.holds(c, 3, relay.Prompt{Model: "m-alias", Tokens: tokens(1, 14)})
	d.holds(c, 0, relay.Prompt{Model: "m", Tokens: tokens(2, 14)})
	d.do("removed", []int64{13})
	d.holds(c, 2, relay.Prompt{Model: "m", Tokens: tokens(1, 14)})
	d.do("stored", tokens(1, 8), []int64{21, 22}, nil, nil, "pepper")
	d.holds(c, 2, relay.Prompt{Model: "m", Tokens: tokens(1, 8), Salt: "pepper"})
	d.holds(c, 0, relay.Prompt{Model: "m", Tokens: tokens(1, 8), Salt: "salt"})

	testkit.Eventually(t, 20*time.Second, "its load and readiness", func() bool {
		d.do("load", 3, 250)
		views, err := c.Pools("m")
		if err != nil || len(views) != 1 {
			return false
		}
		usage, known := views[0].Load.Usage()
		return views[0].State == relay.Ready && known && usage == 0.25
	})
	if views, err := c.Pools("another"); err != nil || len(views) != 0 {
		t.Errorf("pools of a model that it does not have: %v, %v", views, err)
	}
	d.in.Close()
	testkit.Eventually(t, 20*time.Second, "nothing is known of a relay that has ended", func() bool {
		matches, err := c.Match(&relay.Prompt{Model: "m", Tokens: tokens(1, 8)})
		return err != nil && len(matches) == 0
	})
}

// TestDynamoTellsManyBlocks stores and removes blocks at random, and compares.
func TestDynamoTellsManyBlocks(t *testing.T) {
	d := startDynamo(t)
	c := d.follow()
	random := rand.New(rand.NewPCG(7, 7))
	type prompt struct {
		tokens []uint32
		engine []int64
	}
	var prompts []prompt
	next := int64(1)
	for range 60 {
		p := prompt{}
		for range 1 + random.IntN(6) {
			for range blockSize {
				p.tokens = append(p.tokens, random.Uint32N(100_000))
			}
			p.engine = append(p.engine, next)
			next++
		}
		d.stored(p.tokens, p.engine, nil)
		prompts = append(prompts, p)
		if i := random.IntN(len(prompts)); random.IntN(2) == 0 && len(prompts[i].engine) > 0 { // the last blocks of some prompt
			keep := random.IntN(len(prompts[i].engine))
			d.do("removed", prompts[i].engine[keep:])
			prompts[i].engine = prompts[i].engine[:keep]
		}
	}
	wrong := 0
	for _, p := range prompts {
		d.holds(c, len(p.engine), relay.Prompt{Model: "m", Tokens: p.tokens})
		other := append([]uint32{1 << 20}, p.tokens...)
		matches, err := c.Match(&relay.Prompt{Model: "m", Tokens: other})
		if err != nil {
			t.Fatal(err)
		}
		wrong += matches[0].Blocks
	}
	if wrong > 1 {
		t.Errorf("%d blocks were found that are not held", wrong)
	}
}

// TestHashesAreDynamos compares the hashes of random prompts.
func TestHashesAreDynamos(t *testing.T) {
	d := startDynamo(t)
	random := rand.New(rand.NewPCG(3, 3))
	for i := range 60 {
		prompt := relay.Prompt{Salt: []string{"", "pepper"}[i/2%2]}
		pool := relay.Pool{BlockSize: blockSize, Format: []relay.HashFormat{relay.Standard, relay.Eagle}[i%2]}
		adapter := []string{"", "sql"}[i/4%2]
		for range random.IntN(30) {
			prompt.Tokens = append(prompt.Tokens, random.Uint32())
		}
		var local []uint64
		if err := json.Unmarshal(d.do("hashes", append([]uint32{}, prompt.Tokens...), null(adapter), pool.Format == relay.Eagle, null(prompt.Salt)), &local); err != nil {
			t.Fatal(err)
		}
		if got, want := pool.Hashes(&prompt, adapter), kv.SequenceHashes(nil, local); !slices.Equal(got, want) {
			t.Errorf("%+v of adapter %q: %v, Dynamo's are %v", prompt, adapter, got, want)
		}
	}
}

// null returns nil for an empty text.
func null(text string) any {
	if text == "" {
		return nil
	}
	return text
}

var update = flag.Bool("update", false, "write the messages that internal/relay tests decode")

// TestMessagesAreEncodedAlike decodes messages of Dynamo's relay and encodes them again.
// With -update it writes them to the test data of internal/relay.
func TestMessagesAreEncodedAlike(t *testing.T) {
	d := startDynamo(t)
	d.stored(tokens(1, 8), []int64{11, 12}, nil)
	folder := filepath.Join("..", "..", "..", "internal", "relay", "testdata", "dynamo")
	same := func(name string, theirs []byte, ours func() []byte) {
		t.Helper()
		if *update {
			if err := os.WriteFile(filepath.Join(folder, name+".bin"), theirs, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := ours(); !bytes.Equal(got, theirs) {
			t.Errorf("%s is encoded as %x, Dynamo's is %x", name, got, theirs)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var catalog *relay.Catalog
	catalogs := d.subscribe("WatchKvPoolCatalog", nil)
	testkit.Eventually(t, 20*time.Second, "a pool", func() bool {
		theirs := catalogs.next()
		var err error
		catalog, err = relay.DecodeCatalog(theirs)
		must(err)
		same("catalog", theirs, catalog.Encode)
		return len(catalog.Pools) == 1
	})
	readiness := d.subscribe("SubscribeServingReadiness", nil).next()
	r, err := relay.DecodeReadiness(readiness)
	must(err)
	same("readiness", readiness, r.Encode)
	loads := d.subscribe("SubscribeKvPoolLoad", nil)
	testkit.Eventually(t, 20*time.Second, "a load", func() bool {
		d.do("load", 3, 250)
		theirs := loads.next()
		l, err := relay.DecodeLoad(theirs)
		must(err)
		same("load", theirs, l.Encode)
		return len(l.Pools) == 1 && l.Pools[0].Used == 250
	})
	info := d.subscribe("GetRelayInfo", nil).next()
	same("info", info, (&relay.Catalog{Relay: catalog.Relay}).EncodeInfo)

	stream, err := relay.NewStream(catalog.Pools[0].Producer)
	must(err)
	pool := d.subscribe("SubscribeKvPool", catalog.Pools[0].Producer.Encode())
	step := func(name string, kind relay.Kind, want int) {
		t.Helper()
		for {
			theirs := pool.next()
			u, err := relay.DecodeUpdate(theirs)
			must(err)
			must(stream.Apply(u))
			if u.Kind != kind && u.Kind == relay.Heartbeat {
				continue
			}
			same(name, theirs, u.Encode)
			if got := stream.Filter().Prefix(catalog.Pools[0].Hashes(&relay.Prompt{Tokens: tokens(1, 12)}, "")); u.Kind != kind || got != want {
				t.Fatalf("%s has kind %d, and %d blocks are held: want %d, %d", name, u.Kind, got, kind, want)
			}
			return
		}
	}
	step("snapshot", relay.Snapshot, 2)
	d.stored(tokens(9, 12), []int64{13}, 12)
	step("stored", relay.Delta, 3)
	d.do("removed", []int64{12, 13})
	step("removed", relay.Delta, 1)
	step("heartbeat", relay.Heartbeat, 1)
}
