package relay

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
	"kvrouter/internal/testkit/relaytest"
)

// matchOver follows a relay as worker 5, and returns what an index over another finds of
// tokens.
func matchOver(t *testing.T, address string, d BelowDeps, index radix.Index) (*Below, func(tokens []uint32) []kv.Match) {
	t.Helper()
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	b, err := NewBelow([]Cell{{Worker: 5, Address: address, TLS: d.TLS != nil}}, d)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Background(t, b.Run)
	over := b.Over(index)
	return b, func(tokens []uint32) []kv.Match {
		local := kv.HashBlocks(nil, tokens, 4, "", "")
		return over.Match(local, len(local), 0, []kv.Match{{Worker: kv.WorkerKey{Worker: 99}}})[1:]
	}
}

func key(worker uint64) kv.WorkerKey { return kv.WorkerKey{Worker: worker} }

func TestACellIsMatchedByItsRelay(t *testing.T) {
	x, pool := startRelay(t, 0, upTo(8))
	tree := radix.NewTree()
	for _, worker := range []uint64{3, 5, 7} { // 5 is the cell: the relay knows better
		local := kv.HashBlocks(nil, upTo(16), 4, "", "")
		if err := radixtest.Store(tree, key(worker), 0, false, []kv.StoredBlock{{Engine: 1, Local: local[0]}, {Engine: 2, Local: local[1]}, {Engine: 3, Local: local[2]}}); err != nil {
			t.Fatal(err)
		}
	}
	_, match := matchOver(t, x.Address, BelowDeps{Model: "m", BlockSize: 4}, tree)
	finds := func(what string, tokens []uint32, want ...kv.Match) {
		t.Helper()
		var got []kv.Match
		testkit.Eventually(t, 20*time.Second, what, func() bool {
			got = match(tokens)
			return cmp.Equal(got, want)
		})
	}
	finds("the relay's match", upTo(16), kv.Match{Worker: key(3), Blocks: 3}, kv.Match{Worker: key(5), Blocks: 2}, kv.Match{Worker: key(7), Blocks: 3})
	x.Hold(pool, hashesOf(upTo(16))...)
	finds("a longer one", upTo(16), kv.Match{Worker: key(3), Blocks: 3}, kv.Match{Worker: key(5), Blocks: 4}, kv.Match{Worker: key(7), Blocks: 3})
	x.Hold(pool)
	finds("none of the cell", upTo(16), kv.Match{Worker: key(3), Blocks: 3}, kv.Match{Worker: key(7), Blocks: 3})
	if got := match(upTo(3)); len(got) != 0 {
		t.Errorf("a prompt without a full block: %v", got)
	}
	x.Stop()
	finds("those of the index", upTo(16), kv.Match{Worker: key(3), Blocks: 3}, kv.Match{Worker: key(5), Blocks: 3}, kv.Match{Worker: key(7), Blocks: 3})
}

func TestACellThatIsNotReadyIsNotMatched(t *testing.T) {
	x, pool := startRelay(t, 0, upTo(8))
	_, match := matchOver(t, x.Address, BelowDeps{BlockSize: 4}, radix.NewTree()) // the model is that of the relay
	testkit.Eventually(t, 20*time.Second, "a match", func() bool { return len(match(upTo(8))) == 1 })
	x.State(pool, 1)
	testkit.Eventually(t, 20*time.Second, "no match", func() bool { return len(match(upTo(8))) == 0 })
}

func TestARelayIsFollowedOverTLS(t *testing.T) {
	server := httptest.NewTLSServer(nil) // for its certificate
	defer server.Close()
	x := relaytest.Serve(t, 0, &tls.Config{Certificates: server.TLS.Certificates, MinVersion: tls.VersionTLS12})
	pool := relaytest.NewPool(1 << 10)
	x.Announce(pool)
	x.Hold(pool, hashesOf(upTo(8))...)
	authority := x509.NewCertPool()
	authority.AddCert(server.Certificate())
	trusting := func(roots *x509.CertPool) *tls.Config {
		return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	_, match := matchOver(t, x.Address, BelowDeps{BlockSize: 4, TLS: trusting(authority)}, radix.NewTree())
	testkit.Eventually(t, 20*time.Second, "a match", func() bool { return len(match(upTo(8))) == 1 })

	log := &testkit.LogBuffer{}
	deps := BelowDeps{BlockSize: 4, TLS: trusting(x509.NewCertPool()), Log: slog.New(slog.NewTextHandler(log, nil))}
	_, match = matchOver(t, x.Address, deps, radix.NewTree())
	testkit.Eventually(t, 20*time.Second, "an authority that is not trusted", func() bool {
		return strings.Contains(log.String(), "unknown authority")
	})
	if got := match(upTo(8)); len(got) != 0 {
		t.Errorf("a relay that is not trusted: %v", got)
	}
}

func TestRelaysThatCannotBeUsedSayWhy(t *testing.T) {
	x, pool := startRelay(t, 0, upTo(8))
	pool.Models = append(pool.Models, relaytest.Model{Name: "m-sql", Base: "m", Adapter: "sql"})
	x.Announce(pool)
	for want, d := range map[string]BelowDeps{
		`no pool has model "other"`:                         {Model: "other", BlockSize: 4},
		"its blocks have 4 tokens, those of this router 16": {Model: "m", BlockSize: 16},
		`no pool has model "m-sql"`:                         {Model: "m-sql", BlockSize: 4}, // an adapter
	} {
		b, match := matchOver(t, x.Address, d, radix.NewTree())
		testkit.Eventually(t, 20*time.Second, want, func() bool { return strings.Contains(b.cells[0].client.Unfit(), want) })
		if got := match(upTo(8)); len(got) != 0 {
			t.Errorf("%s: it matches %v", want, got)
		}
	}
}

func TestAnIndexOfCellsMatchesWhatWasRouted(t *testing.T) {
	b, err := NewBelow(nil, BelowDeps{BlockSize: 4, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	approx := radix.NewApprox(time.Minute, 100, 0.8, time.Now)
	over := b.Over(approx)
	defer approx.Routed(key(1), []uint64{1, 2}).End(0, 0)
	if got := over.Match([]uint64{1, 2, 3}, 3, 0, nil); len(got) != 1 || got[0].Blocks != 2 {
		t.Errorf("%v", got)
	}
}

func TestCellsAreGivenByWorkerAndAddress(t *testing.T) {
	for text, want := range map[string]*Cell{
		"3=cell:5561":        {Worker: 3, Address: "cell:5561"},
		"0=[::1]:5561":       {Worker: 0, Address: "[::1]:5561"},
		"3=https://cell:443": {Worker: 3, Address: "cell:443", TLS: true},
		"cell:5561":          nil,
		"x=cell:5561":        nil,
		"3=cell":             nil,
		"3=:5561":            nil,
		"3=cell:0":           nil,
		"3=http://cell:5561": nil,
	} {
		var c Cell
		err := c.UnmarshalText([]byte(text))
		if (err == nil) != (want != nil) || want != nil && c != *want {
			t.Errorf("%s: %+v, %v", text, c, err)
		}
	}
	s := Settings{RelayCells: []Cell{{Worker: 1, Address: "a:1"}, {Worker: 1, Address: "b:1"}}}
	if err := s.CheckCells([]uint64{1}, nil); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Error(err)
	}
	if err := s.CheckCells([]uint64{2}, nil); err == nil || !strings.Contains(err.Error(), "no --worker has id=1") {
		t.Error(err)
	}
}
