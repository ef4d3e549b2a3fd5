package envoy

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// TestGatewayGoesWhereThePickerSays sends bodies through Envoy and a minimal picker.
func TestGatewayGoesWhereThePickerSays(t *testing.T) {
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(body)
	}))
	defer worker.Close()
	there := worker.Listener.Addr().String()
	gone := testkit.DeadAddress(t)
	for name, test := range map[string]struct {
		addresses string
		workers   []string // of the gateway
		served    string
	}{
		"one address":                        {addresses: there},
		"the second where the first is dead": {addresses: gone + "," + there, workers: []string{gone, there}, served: there},
	} {
		t.Run(name, func(t *testing.T) {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			picker := &Echo{Addresses: test.addresses}
			defer picker.Serve(listener)()
			gateway := Start(t, Options{Picker: listener.Addr().String(), Workers: test.workers})
			gateway.WaitForPicker(true)
			for _, size := range []int{0, 10, 300_000} {
				body := strings.Repeat("x", size)
				response, err := http.Post(gateway.URL, "text/plain", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				back, err := io.ReadAll(response.Body)
				_ = response.Body.Close()
				if err != nil || response.StatusCode != http.StatusOK || !bytes.Equal(back, []byte(body)) {
					t.Errorf("%d bytes: %s, %d bytes back, %v", size, response.Status, len(back), err)
				}
			}
			if served := picker.Served(); len(served) != 3 || slices.ContainsFunc(served, func(s string) bool { return s != test.served }) {
				t.Errorf("served by %q, want three times %q", served, test.served)
			}
		})
	}
}
