package relay

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kvrouter/internal/testkit/relaytest"
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

func TestDynamosMessagesAreUnderstood(t *testing.T) {
	catalog := must[*Catalog](t)(decodeCatalog(sample(t, "catalog")))
	if len(catalog.Pools) != 1 || len(catalog.Refused) != 0 {
		t.Fatalf("%+v", catalog)
	}
	pool := catalog.Pools[0]
	want := Pool{
		Producer: pool.Producer, encoded: pool.encoded,
		Models: []Model{{Name: "m", Base: "m", Aliases: []string{"m-alias"}}}, BlockSize: 4, Format: Standard, Roles: 1 << Aggregated,
	}
	if diff := cmp.Diff(want, pool, cmp.AllowUnexported(Pool{})); diff != "" {
		t.Errorf("the pool: %s", diff)
	}
	if f := pool.Producer.Format; f != (Format{Seed: 0x5DEECE66D1B54A33, Buckets: 128}) { // for 256 blocks
		t.Errorf("its filter: %+v", f)
	}
	if p := must[Producer](t)(decodeProducer(pool.encoded)); p != pool.Producer {
		t.Errorf("the producer of a subscription is %+v, want %+v", p, pool.Producer)
	}
	readiness := must[*Readiness](t)(decodeReadiness(sample(t, "readiness")))
	if len(readiness.Unavailable) != 0 {
		t.Errorf("the readiness: %+v", readiness)
	}
	info := must[Identity](t)(readAnswer(sample(t, "info"), fields{}))
	for name, identity := range map[string]Identity{"catalog": catalog.Relay, "readiness": readiness.Relay} {
		if identity != info {
			t.Errorf("the relay of the %s is %v, want %v", name, identity, info)
		}
	}
}

func TestDynamosFilterIsFollowed(t *testing.T) {
	pool := must[*Catalog](t)(decodeCatalog(sample(t, "catalog"))).Pools[0]
	stream, hashes := streamOf(pool.Producer), hashesOf(upTo(14))
	for _, step := range []struct {
		name       string
		held, most int
	}{{"snapshot", 2, 2}, {"stored", 3, 3}, {"removed", 1, 1}, {"heartbeat", 1, 1}} {
		u := must[*Update](t)(decodeUpdate(sample(t, step.name)))
		if err := stream.Apply(u); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		if got := stream.Filter().Prefix(hashes); got != step.held || stream.Filter().Held() != step.most {
			t.Errorf("after %s, %d blocks of %d are held: want %d of %d", step.name, got, stream.Filter().Held(), step.held, step.most)
		}
	}
}

// TestTheRelayOfTestsIsLikeDynamos compares the bytes of a snapshot.
func TestTheRelayOfTestsIsLikeDynamos(t *testing.T) {
	u := must[*Update](t)(decodeUpdate(sample(t, "snapshot")))
	pool := relaytest.Pool{DataCenter: u.Producer.Pool.DataCenter, Buckets: u.Producer.Format.Buckets}
	if ours := pool.Snapshot(u.Sequence, pool.Words(hashesOf(upTo(8))...), 0); !bytes.Equal(ours, u.Payload) {
		t.Errorf("%x, want %x", ours, u.Payload)
	}
}
