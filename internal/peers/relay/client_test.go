package relay

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/relaytest"
)

// hashesOf returns the sequence hashes of the full blocks of tokens.
func hashesOf(tokens []uint32) []uint64 {
	return kv.SequenceHashes(nil, kv.HashBlocks(nil, tokens, 4, "", ""))
}

// startRelay starts a relay of a pool that is ready and has the blocks of tokens.
func startRelay(t *testing.T, port int, tokens []uint32) (*relaytest.Relay, relaytest.Pool) {
	t.Helper()
	r, pool := relaytest.Serve(t, port, nil), relaytest.NewPool(1<<10)
	r.Announce(pool)
	r.State(pool, 2)
	r.Hold(pool, hashesOf(tokens)...)
	return r, pool
}

// followed is a client of model m, with its log.
type followed struct {
	*Client
	log *testkit.LogBuffer
}

func followAt(t *testing.T, address string, silence time.Duration) followed {
	t.Helper()
	log := &testkit.LogBuffer{}
	c, err := NewClient(Following{
		Address: address, Silence: silence, Want: Want{Model: "m", BlockSize: 4}, Log: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	testkit.Background(t, c.Run)
	return followed{c, log}
}

// finds waits until that many leading blocks of the tokens are found; -1: none is known.
func (f followed) finds(t *testing.T, what string, blocks int, tokens []uint32) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, what, func() bool {
		known := f.held.Load()
		if known == nil {
			return blocks == -1
		}
		return known.prefix(hashesOf(tokens)) == blocks
	})
}

func TestARelayThatRestartsIsFollowedAnew(t *testing.T) {
	port := testkit.FreePorts(t, 1)
	r, _ := startRelay(t, port, upTo(8))
	c := followAt(t, r.Address, 0)
	c.finds(t, "two blocks", 2, upTo(12))
	r.Stop()
	c.finds(t, "nothing is known of it", -1, nil)
	startRelay(t, port, upTo(4))
	c.finds(t, "the block after its restart", 1, upTo(12))
}

func TestAPoolThatIsWithdrawnIsForgotten(t *testing.T) {
	r, pool := startRelay(t, 0, upTo(8))
	c := followAt(t, r.Address, 0)
	c.finds(t, "two blocks", 2, upTo(12))
	r.Announce()
	c.finds(t, "nothing is known", -1, nil)
	testkit.Eventually(t, 20*time.Second, "its stream has ended", func() bool { return r.Streams(relaytest.PoolOf) == 0 })
	r.Announce(pool)
	c.finds(t, "two blocks again", 2, upTo(12))
}

func TestAWrongRelayIsNotBelieved(t *testing.T) {
	pool := relaytest.NewPool(1 << 10)
	changed := func(change func(p *relaytest.Pool)) relaytest.Pool {
		p := pool
		change(&p)
		return p
	}
	catalog := func(p ...relaytest.Pool) func(relaytest.Identity) []byte {
		return func(id relaytest.Identity) []byte { return id.Catalog(p...) }
	}
	raw := func(text []byte) func(relaytest.Identity) []byte {
		return func(relaytest.Identity) []byte { return text }
	}
	for _, one := range []struct {
		name                  string
		info, catalog, stream func(relaytest.Identity) []byte
		want                  string // in the log, or why no pool is fit; empty: the block is found
	}{
		{name: "a right one"},
		{name: "another contract", info: raw([]byte{}), want: "marker 0x0"},
		{name: "a later version", info: raw(relaytest.Message{}.Number(1, 2).Text(2, "").Sealed()), want: "version 2"},
		{name: "a catalog that is none", catalog: raw([]byte{0xff}), want: "unexpected EOF"},
		{name: "a pool twice", catalog: catalog(pool, pool), want: "twice"},
		{name: "a pool with a hash format of later", catalog: catalog(changed(func(p *relaytest.Pool) { p.Format = 9 })), want: "hash format 9"},
		{name: "a pool with a role of later", catalog: catalog(changed(func(p *relaytest.Pool) { p.Roles = []byte{9} })), want: "role 9"},
		{name: "a pool without a role", catalog: catalog(changed(func(p *relaytest.Pool) { p.Roles = nil })), want: "without a role"},
		{name: "a pool without a block size", catalog: catalog(changed(func(p *relaytest.Pool) { p.BlockSize = 0 })), want: "a block of 0 tokens"},
		{name: "a pool of an odd size", catalog: catalog(changed(func(p *relaytest.Pool) { p.Buckets = 3 })), want: "3 buckets"},
		{name: "a pool that is too large", catalog: catalog(changed(func(p *relaytest.Pool) { p.Buckets = 2 * maxBuckets })), want: "a filter of"},
		{name: "a model of a kind of later", catalog: catalog(changed(func(p *relaytest.Pool) { p.Models = []relaytest.Model{{Name: "m"}} })), want: "the target of model"},
		{name: "a name of two models", want: "different models", catalog: catalog(pool, changed(func(p *relaytest.Pool) {
			p.DataCenter++
			p.Models = []relaytest.Model{{Name: "x", Base: "x", Aliases: []string{"m"}}}
		}))},
		{name: "a pool that does not compute prompts", catalog: catalog(changed(func(p *relaytest.Pool) { p.Roles = []byte{2} })), want: "no pool computes prompts"},
		{name: "blocks with the token behind them", catalog: catalog(changed(func(p *relaytest.Pool) { p.Format = 2 })), want: "hashed with the token behind them"},
		{name: "a stream of another relay", want: "another relay", stream: func(relaytest.Identity) []byte {
			return relaytest.Identity{Instance: 8, Incarnation: 8}.Update(pool, relaytest.Snapshot, 0, 0, pool.Snapshot(0, pool.Words(), 0))
		}},
		{name: "a stream that is none", stream: raw([]byte{0xff}), want: "unexpected EOF"},
	} {
		t.Run(one.name, func(t *testing.T) {
			r := relaytest.Serve(t, 0, nil)
			id := r.Identity
			answer := func(method string, given func(relaytest.Identity) []byte, right []byte) {
				if given != nil {
					right = given(id)
				}
				r.Send(method, right)
			}
			answer(relaytest.Info, one.info, id.Info())
			answer(relaytest.CatalogOf, one.catalog, id.Catalog(pool))
			answer(relaytest.PoolOf, one.stream, id.Update(pool, relaytest.Snapshot, 0, 0, pool.Snapshot(0, pool.Words(hashesOf(upTo(4))...), 0)))
			c := followAt(t, r.Address, 0)
			if one.want == "" {
				c.finds(t, "the block", 1, upTo(4))
				return
			}
			testkit.Eventually(t, 20*time.Second, one.want, func() bool { return strings.Contains(c.log.String()+c.Unfit(), one.want) })
			if known := c.held.Load(); known != nil && known.prefix(hashesOf(upTo(4))) != 0 {
				t.Error("a block is found")
			}
		})
	}
}

// TestARelayThatSendsWithoutAPauseWaits: so that it takes no more than its share of this router.
func TestARelayThatSendsWithoutAPauseWaits(t *testing.T) {
	r := relaytest.Serve(t, 0, nil)
	const sent = 2 * maxStates
	for range sent {
		r.Send(relaytest.CatalogOf, r.Identity.Catalog())
	}
	c, err := NewClient(Following{Address: r.Address, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.conn.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	began, read := time.Now(), 0
	err = c.receive(ctx, relaytest.CatalogOf, nil, 0, func([]byte) error {
		if read++; read == sent {
			return io.EOF
		}
		return nil
	})
	if took := time.Since(began); read != sent || took < 800*time.Millisecond || !errors.Is(err, io.EOF) {
		t.Errorf("%d catalogs in %v: %v", read, took, err)
	}
}

func TestASilentPoolIsEmptied(t *testing.T) {
	r, _ := startRelay(t, 0, upTo(4))
	c := followAt(t, r.Address, 500*time.Millisecond)
	c.finds(t, "the block", 1, upTo(4))
	c.finds(t, "its filter is emptied", -1, nil)
	if log := c.log.String(); !strings.Contains(log, "no message for") {
		t.Error(log)
	}
}
