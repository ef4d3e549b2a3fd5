package main

import (
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

func TestMooncakeWithoutBootstrapServerStaysWhole(t *testing.T) {
	h := newTestPairAPI(t, Config{}, kv.KindMooncake, 1, 1, nil)
	target := h.router.Targets()[0]
	target.Bootstrap.Port = 1
	h.router.Up(target)
	rule := new(routertest.Clerk)
	h.router.Policy = rule
	response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
	if response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
		t.Errorf("%s: %s", response.Status, answer)
	}
	h.settled(t)
	if page := h.metrics(t); !strings.Contains(page, `kvrouter_disagg_requests_total{kind="mooncake",result="prefill_failed"} 1`) {
		t.Error("not counted")
	}
	ends := rule.Endings()
	for _, want := range []routertest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}, {Ending: policy.Abandoned, TokensOut: 0}, {Ending: policy.Finished, TokensOut: 1}} { // prefill, decode and all of it
		if !slices.Contains(ends, want) || len(ends) != 3 {
			t.Errorf("told %v, want %v", ends, want)
		}
	}
}

// TestPrefillWorkerThatGoesDuringTheTransfer: the decode worker would wait for it
// for minutes, and gets the request again without a transfer.
func TestPrefillWorkerThatGoesDuringTheTransfer(t *testing.T) {
	for _, again := range []bool{false, true} { // it has come back when its absence is looked for
		for _, stream := range []bool{false, true} {
			waits := make(chan struct{}, 1)
			h := newTestPairAPI(t, Config{}, kv.KindMooncake, 1, 1, func(id uint64, serve engineServe) engineServe {
				return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
					if id == 0 || !body.Get("kv_transfer_params").Exists() {
						serve(w, r, body)
						return
					}
					waits <- struct{}{}
					<-r.Context().Done()
				}
			})
			prefill := h.router.Targets()[0]
			go func() { // ends once the decode leg has come
				<-waits
				h.router.Down(prefill.Key)
				if again {
					prefill.Generation++
					h.router.Up(prefill)
				}
			}()
			response, answer := h.post(t, testkit.ChatPath, sharedChat(stream))
			if response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
				t.Errorf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			if blamed := h.blamed(); !slices.Equal(blamed, []uint64{0}) {
				t.Errorf("blamed are %v", blamed)
			}
			if page := h.metrics(t); !strings.Contains(page, `kvrouter_disagg_requests_total{kind="mooncake",result="prefill_failed"} 1`) {
				t.Error("not counted")
			}
		}
	}
}
