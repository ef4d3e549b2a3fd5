package models_test

import (
	"fmt"
	"strings"
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/models"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

func TestWorkersAreShownUnderTheTypeThatTheyHave(t *testing.T) {
	rt := routertest.NewTestRouter(t, "kv", 1)
	metrics := models.NewCollector(routertest.Models(rt))
	target := kv.Target{Key: kv.WorkerKey{Worker: 1}, Disagg: kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindNIXL}}
	rt.Up(target)
	rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 2}, Disagg: kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}})
	shown := func(when string, want ...string) {
		t.Helper()
		for _, name := range []string{"dynamo_frontend_worker_active_decode_blocks", "dynamo_frontend_worker_active_prefill_tokens"} {
			n := 0
			for line := range testkit.Scrape(t, metrics) {
				if strings.HasPrefix(line, name) {
					n++
				}
			}
			if n != len(want) {
				t.Errorf("%s: %s has %d series, want %d", when, name, n, len(want))
			}
			for worker, kind := range want {
				if _, has := testkit.Scrape(t, metrics)[fmt.Sprintf(`%s{dp_rank="0",worker_id="%d",worker_type="%s"}`, name, worker, kind)]; !has {
					t.Errorf("%s: %s does not show worker %d as %s", when, name, worker, kind)
				}
			}
		}
	}
	shown("all up", "decode", "prefill", "decode")
	booking, err := rt.Book(router.Request{NumTokens: 9}, target.Key)
	if err != nil {
		t.Fatal(err)
	}
	rt.Down(kv.WorkerKey{Worker: 2})
	rt.Down(target.Key)
	shown("down with a request in flight", "decode", "prefill")
	target.Disagg = kv.Disagg{}
	rt.Up(target)
	shown("back in another role", "decode", "decode")
	booking.End()
	rt.Down(target.Key)
	shown("gone", "decode")
}
