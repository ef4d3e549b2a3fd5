package selection

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/workers"
)

// registeredWorker is a worker that a client has registered.
type registeredWorker struct {
	id   uint64
	spec workerSpec
	// missing has the reasons why the worker cannot be routed to; none: it is registered
	// with the fleet.
	missing []string
}

func (w registeredWorker) partition() events.Partition {
	return events.Partition{Model: *w.spec.ModelName, Group: *w.spec.RoutingGroup}
}

// registration converts the spec for the fleet, or returns the missing fields. An error is an invalid
// value.
func (w registeredWorker) registration(settings Settings) (r workers.Registration, missing []string, err error) {
	spec := w.spec
	if err := spec.check(); err != nil {
		return r, nil, err
	}
	r = workers.Registration{ID: w.id, Model: *spec.ModelName, MaxBatchedTokens: Given(spec.MaxBatchedTokens, 0),
		TotalBlocks: Given(spec.TotalBlocks, 0), BlockSize: Given(spec.BlockSize, 0), Key: Given(spec.APIKey, "")}
	r.Disagg = kv.Disagg{Role: Given(spec.Role, kv.RoleBoth), Kind: Given(spec.Kind, kv.KindNone),
		Bootstrap: kv.Bootstrap{Host: Given(spec.BootstrapHost, ""), Port: Given(spec.BootstrapPort, 0)},
		P2P:       kv.Bootstrap{Host: Given(spec.P2PHost, ""), Port: Given(spec.P2PPort, 0)}}
	if Given(spec.Endpoint, "") == "" {
		missing = append(missing, "endpoint is required")
	} else if r.URL, err = kv.ParseURL(*spec.Endpoint); err != nil {
		return r, nil, fmt.Errorf("endpoint: %w", err)
	}
	if r.BlockSize <= 0 {
		missing = append(missing, "block_size must be greater than 0")
	}
	if settings.CountsPasses && spec.MaxBatchedTokens == nil {
		missing = append(missing, "max_num_batched_tokens is required while queueing is enabled")
	}
	start, count := Given(spec.StartRank, 0), Given(spec.RankCount, 1)
	if count == 0 {
		missing = append(missing, "data_parallel_size must be greater than 0")
	}
	for i := range count {
		rank := start + i
		r.Ranks = append(r.Ranks, rank)
		source, err := w.source(rank, int(i), settings)
		if err != nil {
			return r, nil, err
		}
		switch {
		case !settings.KVEvents: // they are not followed
		case source.Endpoint != "":
			r.Sources = append(r.Sources, source)
		default:
			missing = append(missing, fmt.Sprintf("kv_events endpoint is required for dp_rank %d", rank))
		}
	}
	return r, missing, nil
}

// source returns the source of the KV events of a rank, the nth of its worker.
func (w registeredWorker) source(rank uint32, n int, settings Settings) (events.Source, error) {
	source := events.Source{Worker: kv.WorkerKey{Worker: w.id, Rank: rank}, BlockSize: settings.BlockSize}
	for _, end := range []struct {
		field string
		given *string
		to    *string
	}{
		{"kv_events_endpoint", w.spec.KVEventsEndpoint, &source.Endpoint},
		{"replay_endpoint", w.spec.ReplayEndpoint, &source.Replay},
	} {
		if Given(end.given, "") == "" {
			continue
		}
		first, err := remoteEndpoint(*end.given)
		if err == nil {
			*end.to, err = portsOn(first, n)
		}
		if err != nil {
			return source, fmt.Errorf("%s: %w", end.field, err)
		}
	}
	if len(w.spec.KVEventsEndpoints) > 0 {
		own, found := w.spec.KVEventsEndpoints[rank]
		if !found || own == "" {
			return events.Source{}, nil
		}
		var err error
		if source.Endpoint, err = remoteEndpoint(own); err != nil {
			return source, fmt.Errorf("kv_events_endpoints[%d]: %w", rank, err)
		}
	}
	return source, nil
}

// remoteEndpoint parses an endpoint of a client, which must not be a socket in the file
// system of this machine.
func remoteEndpoint(value string) (string, error) {
	if strings.HasPrefix(value, "ipc:") {
		return "", errors.New("ipc endpoints are for --worker only: give one such as tcp://host:5557")
	}
	return kv.ParseEndpoint(value)
}

// portsOn adds n to the port of a tcp endpoint, as vLLM does for data-parallel ranks.
func portsOn(endpoint string, n int) (string, error) {
	at := strings.LastIndexByte(endpoint, ':')
	if n == 0 || at < 0 {
		return endpoint, nil
	}
	number, err := strconv.Atoi(endpoint[at+1:])
	if err != nil || number+n > 65535 {
		return "", fmt.Errorf("%s plus %d, for the rank, is no valid port: give kv_events_endpoints by rank", endpoint, n)
	}
	return fmt.Sprintf("%s:%d", endpoint[:at], number+n), nil
}
