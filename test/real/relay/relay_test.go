// Package relay has the tests of the relay's contract against Dynamo's own relay.
package relay

import (
	"bufio"
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

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/peers/relay"
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

// follow returns what a router finds of a prompt's tokens in the cell of the relay.
func (d *dynamo) follow(adapter string) func(tokens []uint32) int {
	d.Helper()
	deps := relay.BelowDeps{Model: "m", BlockSize: blockSize, Log: slog.New(slog.DiscardHandler)}
	below, err := relay.NewBelow([]relay.Cell{{Address: d.address}}, deps)
	if err != nil {
		d.Fatal(err)
	}
	testkit.Background(d, below.Run)
	index := below.Over(radix.NewTree())
	return func(tokens []uint32) (blocks int) {
		local := kv.HashBlocks(nil, tokens, blockSize, adapter, "")
		for _, m := range index.Match(local, len(local), 0, nil) {
			blocks = m.Blocks
		}
		return blocks
	}
}

// finds waits until that many blocks of a prompt are found.
func (d *dynamo) finds(found func([]uint32) int, want int, prompt []uint32) {
	d.Helper()
	testkit.Eventually(d.T, 30*time.Second, fmt.Sprintf("%d blocks of %d", want, prompt), func() bool { return found(prompt) == want })
}

func tokens(from, to uint32) (list []uint32) {
	for ; from <= to; from++ {
		list = append(list, from)
	}
	return list
}

// TestDynamosBlocksAreFound follows Dynamo's relay while its worker stores and removes blocks, of
// the model and with a salt.
func TestDynamosBlocksAreFound(t *testing.T) {
	d := startDynamo(t)
	d.stored(tokens(1, 8), []int64{11, 12}, nil)
	found, adapter := d.follow(""), d.follow("sql")
	d.finds(found, 2, tokens(1, 14))
	d.stored(tokens(9, 12), []int64{13}, 12)
	d.finds(found, 3, tokens(1, 14))
	d.finds(found, 0, tokens(2, 14))
	d.finds(adapter, 0, tokens(1, 14))
	d.do("removed", []int64{13})
	d.finds(found, 2, tokens(1, 14))
	d.do("stored", tokens(21, 28), []int64{21, 22}, nil, nil, "pepper")
	d.stored(tokens(31, 34), []int64{31}, nil)
	d.finds(found, 1, tokens(31, 34))
	d.finds(found, 0, tokens(21, 28))
	d.in.Close()
	d.finds(found, 0, tokens(1, 14))
}

// TestManyBlocksOfDynamosAreFound stores and removes blocks at random, and compares.
func TestManyBlocksOfDynamosAreFound(t *testing.T) {
	d := startDynamo(t)
	found := d.follow("")
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
		d.finds(found, len(p.engine), p.tokens)
		wrong += found(append([]uint32{1 << 20}, p.tokens...))
	}
	if wrong > 1 {
		t.Errorf("%d blocks were found that Dynamo does not have", wrong)
	}
}

// TestHashesAreDynamos compares the hashes of random prompts.
func TestHashesAreDynamos(t *testing.T) {
	d := startDynamo(t)
	random := rand.New(rand.NewPCG(3, 3))
	for i := range 60 {
		adapter, prompt := []string{"", "sql"}[i%2], []uint32{}
		for range random.IntN(30) {
			prompt = append(prompt, random.Uint32())
		}
		var theirs []uint64
		if err := json.Unmarshal(d.do("hashes", prompt, null(adapter), false, nil), &theirs); err != nil {
			t.Fatal(err)
		}
		if ours := kv.HashBlocks(nil, prompt, blockSize, adapter, ""); !slices.Equal(ours, theirs) {
			t.Errorf("%v of adapter %q: %v, Dynamo's are %v", prompt, adapter, ours, theirs)
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

var update = flag.Bool("update", false, "write the messages that internal/peers/relay tests decode")

// TestMessagesAreWritten writes messages of Dynamo's relay to the test data of internal/peers/relay,
// with -update.
func TestMessagesAreWritten(t *testing.T) {
	if !*update {
		t.Skip("writes test data: run it with -update")
	}
	d := startDynamo(t)
	d.stored(tokens(1, 8), []int64{11, 12}, nil)
	write := func(name string, message []byte) {
		t.Helper()
		folder := filepath.Join("..", "..", "..", "internal", "relay", "testdata", "dynamo")
		if err := os.WriteFile(filepath.Join(folder, name+".bin"), message, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var catalog, producer []byte
	catalogs := d.subscribe("WatchKvPoolCatalog", nil)
	testkit.Eventually(t, 20*time.Second, "a pool", func() bool {
		catalog = catalogs.next()
		producer = field(field(field(catalog, 4), 1), 1)
		return producer != nil
	})
	write("catalog", catalog)
	write("readiness", d.subscribe("SubscribeServingReadiness", nil).next())
	write("info", d.subscribe("GetRelayInfo", nil).next())
	pool := d.subscribe("SubscribeKvPool", producer)
	write("snapshot", pool.next())
	step := func(name string, heartbeat bool) { // Dynamo's heartbeats have no frame
		t.Helper()
		message := pool.next()
		for (field(message, 8) == nil) != heartbeat {
			message = pool.next()
		}
		write(name, message)
	}
	d.stored(tokens(9, 12), []int64{13}, 12)
	step("stored", false)
	d.do("removed", []int64{12, 13})
	step("removed", false)
	step("heartbeat", true)
}

// field returns the content of a message's first field of that number; nil: it has none.
func field(message []byte, number protowire.Number) []byte {
	for len(message) > 0 {
		at, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return nil
		}
		size := protowire.ConsumeFieldValue(at, kind, message[n:])
		if size < 0 {
			return nil
		}
		if at == number && kind == protowire.BytesType {
			text, _ := protowire.ConsumeBytes(message[n:])
			return text
		}
		message = message[n+size:]
	}
	return nil
}
