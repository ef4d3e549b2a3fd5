package browser

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/natstest"
	"kvrouter/test"
)

// TestBrowserSeesTheCluster holds the table against GET /cluster of two routers over the same workers.
func TestBrowserSeesTheCluster(t *testing.T) {
	const workers = 2
	b := startBrowser(t)
	mocks, own := test.StartWorkers(t, workers), testkit.FreePorts(t, 2)
	var routers []*test.Router
	for i := range 2 {
		s := test.StartOver(t, mocks, "--cluster=fleet1", fmt.Sprintf("--cluster-port=%d", own+i), fmt.Sprintf("--cluster-peers=127.0.0.1:%d", own+1-i))
		routers = append(routers, s.Router)
	}
	if status, answer := test.Post(t, routers[1].Port+"/select_and_reserve", `{"selection_id":"a","token_ids":[1,2,3]}`); status != http.StatusOK {
		t.Fatalf("%d %s", status, answer)
	}
	b.watched(routers[0], workers)
	b.until(20*time.Second, "one line, folded", "document.querySelector('.cluster:not([open]) summary')?.innerText.includes('1 other router')")
	b.click(".cluster summary")
	b.until(20*time.Second, "the other router with its request", "document.querySelector('[data-member] [data-field=in_flight]')?.innerText === '1'")
	shown := gjson.ParseBytes(routers[0].Get(routers[0].Port + "/cluster"))
	id := shown.Get("members.0.id").Str
	row := "[data-member='" + id + "']"
	b.until(20*time.Second, "the round trip", fmt.Sprintf("/^[<0-9]/.test(document.querySelector(%q).innerText)", row+" [data-field=round_trip]"))
	if said := b.text(row + " .c-name"); said != id {
		t.Errorf("the row of %s is named %q", id, said)
	}
	if lag := b.text(row + " [data-field=lag]"); number(lag) < 0 || lag == "–" {
		t.Errorf("the lag is %q", lag)
	}
	if dir := os.Getenv(envPictures); dir != "" {
		b.eachLook(pictureWidths, func(look string) {
			b.fits()
			b.picture(filepath.Join(dir, "cluster-"+look+".png"))
		})
	}
	routers[1].Stop()
	b.until(20*time.Second, "nobody else", "!document.querySelector('[data-member]')")
	b.clean(routers[0].Port)
}

// TestBrowserShowsAHostileMemberAsText: who may publish on an operator's NATS chooses its name.
func TestBrowserShowsAHostileMemberAsText(t *testing.T) {
	const name = "<img/src=x/onerror=pwned=1>"
	b := startBrowser(t)
	operators := natstest.Start(t, server.RANDOM_PORT)
	s := test.StartMocker(t, 1, "--cluster="+operators.ClientURL())
	liar, err := nats.Connect(operators.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(liar.Close)
	b.watched(s, 1)
	b.click(".cluster summary")
	digest := "\x0b\x18\x00\x00\x00kvrouter.v1\x82\xa9router_id\x09\xa4kind\xa6digest"
	testkit.Eventually(t, 20*time.Second, "its row", func() bool {
		if err := liar.Publish("kvrouter."+name, []byte(digest)); err != nil {
			t.Fatal(err)
		}
		return b.text("[data-member] .c-name") == name
	})
	if eval[bool](b, "'pwned' in window || !!document.querySelector('img')") {
		t.Error("the name became HTML")
	}
	b.clean(s.Port)
}
