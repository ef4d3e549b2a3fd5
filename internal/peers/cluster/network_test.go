package cluster

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"kvrouter/internal/peers/replica"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/natstest"
)

// TestRoutesAreThoseOfTheMembers: each has a route to every other, with its round trip and address.
func TestRoutesAreThoseOfTheMembers(t *testing.T) {
	all := ring(t, 3, testKey)
	var first replica.Status
	testkit.Eventually(t, 20*time.Second, "round trips to all", func() bool {
		first = all[0].mesh.Status()
		return len(first.Routes) == 2 && !slices.ContainsFunc(first.Routes, func(r replica.Route) bool { return r.RoundTrip == nil })
	})
	if first.Kind != replica.KindEmbedded || first.Name != "test" || first.ID != all[0].link.id || !first.Connected || first.Server != "" || first.RoundTrip != nil {
		t.Errorf("%+v", first)
	}
	for i, r := range first.Routes {
		if m := first.Members[i]; r.ID != m.ID || r.ID != all[1].link.id && r.ID != all[2].link.id {
			t.Errorf("route to %s, member %s", r.ID, m.ID)
		}
		if !strings.HasPrefix(r.Address, "127.0.0.1:") || *r.RoundTrip <= 0 || *r.RoundTrip > 5 || r.MessagesIn == 0 || r.MessagesOut == 0 {
			t.Errorf("%+v, round trip %f", r, *r.RoundTrip)
		}
	}
	all[2].stop()
	testkit.Eventually(t, 20*time.Second, "its route has gone", func() bool { return len(all[0].mesh.Status().Routes) == 1 })
}

// TestAnExistingServerIsShownWithoutSecrets: with the round trip to it while it is connected.
func TestAnExistingServerIsShownWithoutSecrets(t *testing.T) {
	port := testkit.FreePorts(t, 1)
	s := natstest.Start(t, port, func(o *server.Options) { o.Authorization = "hidden-token" })
	address := s.Addr().String()
	m := start(t, Settings{Cluster: "nats://hidden-token@" + address, ClusterPrefix: "fleets.one"}, nil)
	testkit.Eventually(t, 20*time.Second, "a round trip", func() bool { return m.link.Network().RoundTrip != nil })
	n := m.link.Network()
	if n.Kind != replica.KindExisting || n.Name != "fleets.one" || n.Server != "nats://"+address || !n.Connected || n.Routes != nil || *n.RoundTrip > measureLimit.Seconds() {
		t.Errorf("%+v", n)
	}
	s.Shutdown()
	s.WaitForShutdown()
	testkit.Eventually(t, 20*time.Second, "it is away", func() bool {
		n := m.link.Network()
		return !n.Connected && n.Server == "" && n.RoundTrip == nil
	})
	natstest.Start(t, port, func(o *server.Options) { o.Authorization = "hidden-token" })
	testkit.Eventually(t, 20*time.Second, "it is back", func() bool { return m.link.Network().RoundTrip != nil })
	if m.log.count("hidden-token") > 0 || m.log.count("NATS connected") != 1 {
		t.Errorf("%s", m.log.text.String())
	}
}
