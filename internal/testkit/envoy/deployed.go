package envoy

import (
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/goccy/go-yaml"
)

// readdress returns a configuration whose one listener is at port of loopback, with the
// admin port after it, and whose clusters "picker" and "workers" have these addresses.
func readdress(text []byte, port int, pickers, workers []string) ([]byte, error) {
	var all map[string]any
	if err := yaml.Unmarshal(text, &all); err != nil {
		return nil, err
	}
	resources, _ := all["static_resources"].(map[string]any)
	listeners, _ := resources["listeners"].([]any)
	clusters, _ := resources["clusters"].([]any)
	if len(listeners) != 1 || len(clusters) != 2 {
		return nil, fmt.Errorf("%d listeners and %d clusters, want 1 and 2", len(listeners), len(clusters))
	}
	listener, _ := listeners[0].(map[string]any)
	if listener == nil {
		return nil, errors.New("the listener is not an object")
	}
	listener["address"] = socket("127.0.0.1", port)
	all["admin"] = map[string]any{"address": socket("127.0.0.1", port+1)}
	for _, one := range clusters {
		cluster, _ := one.(map[string]any)
		addresses := map[any][]string{"picker": pickers, "workers": workers}[cluster["name"]]
		if len(addresses) == 0 {
			return nil, fmt.Errorf("no addresses for cluster %v", cluster["name"])
		}
		var endpoints []any
		for _, address := range addresses {
			host, number, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			at, err := strconv.Atoi(number)
			if err != nil {
				return nil, err
			}
			endpoints = append(endpoints, map[string]any{"endpoint": map[string]any{"address": socket(host, at)}})
		}
		cluster["load_assignment"] = map[string]any{"cluster_name": cluster["name"],
			"endpoints": []any{map[string]any{"lb_endpoints": endpoints}}}
	}
	return yaml.Marshal(all)
}

// socket is an address in Envoy's format.
func socket(host string, port int) any {
	return map[string]any{"socket_address": map[string]any{"address": host, "port_value": port}}
}
