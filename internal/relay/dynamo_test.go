package relay

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// sample returns a message of Dynamo's relay 1.6.1, as test/real/relay writes them.
func sample(t testing.TB, name string) []byte {
	t.Helper()
	message, err := os.ReadFile(filepath.Join("testdata", "dynamo", name+".bin"))
	if err != nil {
		t.Fatal(err)
	}
	return message
}

func must[T any](t rapid.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// upTo returns the tokens 1 to n.
func upTo(n uint32) (list []uint32) {
	for i := range n {
		list = append(list, i+1)
	}
	return list
}

func TestDynamosMessagesAreUnderstoodAndEncodedAlike(t *testing.T) {
	catalog := must[*Catalog](t)(DecodeCatalog(sample(t, "catalog")))
	if len(catalog.Pools) != 1 || len(catalog.Refused) != 0 {
		t.Fatalf("%+v", catalog)
	}
	pool := catalog.Pools[0]
	want := Pool{
		Producer: pool.Producer, Endpoint: Endpoint{"prod", "backend", "generate"}, Models: []Model{{Name: "m", Base: "m", Aliases: []string{"m-alias"}}},
		BlockSize: 4, Format: Standard, Roles: []Role{Aggregated},
	}
	if diff := cmp.Diff(want, pool); diff != "" {
		t.Errorf("the pool: %s", diff)
	}
	if pool.Producer.Format != FormatFor(256) { // with which it was started
		t.Errorf("its filter: %+v, want %+v", pool.Producer.Format, FormatFor(256))
	}
	readiness := must[*Readiness](t)(DecodeReadiness(sample(t, "readiness")))
	if e := readiness.Entries; len(e) != 1 || e[0].State != Ready || e[0].Model != "m" || len(e[0].Members) != 1 || e[0].Members[0].Pool != pool.Producer.Pool {
		t.Errorf("the readiness: %+v", readiness)
	}
	load := must[*Load](t)(DecodeLoad(sample(t, "load")))
	if len(load.Pools) != 1 || load.Pools[0].Producer != pool.Producer {
		t.Fatalf("the load: %+v", load)
	}
	if usage, known := load.Pools[0].Usage(); usage != 0.25 || !known {
		t.Errorf("the usage is %v (known: %v), want 0.25", usage, known)
	}
	info := must[Identity](t)(decodeInfo(sample(t, "info")))
	for name, identity := range map[string]Identity{"catalog": catalog.Relay, "readiness": readiness.Relay, "load": load.Relay} {
		if identity != info {
			t.Errorf("the relay of the %s is %v, want %v", name, identity, info)
		}
	}
	for name, ours := range map[string][]byte{"catalog": catalog.Encode(), "readiness": readiness.Encode(), "load": load.Encode(), "info": catalog.EncodeInfo()} {
		if !bytes.Equal(ours, sample(t, name)) {
			t.Errorf("%s is encoded as %x, want %x", name, ours, sample(t, name))
		}
	}
}

func TestDynamosFilterIsFollowed(t *testing.T) {
	pool := must[*Catalog](t)(DecodeCatalog(sample(t, "catalog"))).Pools[0]
	stream := must[*Stream](t)(NewStream(pool.Producer))
	hashes := pool.Hashes(&Prompt{Tokens: upTo(14)}, "")
	if n := len(hashes); n != 3 {
		t.Fatalf("%d full blocks, want 3", n)
	}
	for _, step := range []struct {
		name       string
		held, most int
	}{{"snapshot", 2, 2}, {"stored", 3, 3}, {"removed", 1, 1}, {"heartbeat", 1, 1}} {
		u := must[*Update](t)(DecodeUpdate(sample(t, step.name)))
		if err := stream.Apply(u); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		if got := stream.Filter().Prefix(hashes); got != step.held || stream.Filter().Held() != step.most {
			t.Errorf("after %s, %d blocks of %d are held: want %d of %d", step.name, got, stream.Filter().Held(), step.held, step.most)
		}
		if !bytes.Equal(u.Encode(), sample(t, step.name)) {
			t.Errorf("%s is encoded as %x, want %x", step.name, u.Encode(), sample(t, step.name))
		}
	}
}
