package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/kv"
)

// Times of DNS. Go's resolver tells no TTL, and caches nothing: it is asked at a fixed
// pace, and the caches of name servers on the way keep to the TTL.
const (
	dnsEvery = 5 * time.Second // between questions
	dnsLimit = 4 * time.Second // longest wait for all answers to one
	dnsKeep  = 5 * time.Minute // how long workers are kept that no answer confirms
	dnsMost  = 16              // questions at once about the hosts of SRV records
)

// dnsQuestion is what --discovery asks name servers.
type dnsQuestion struct {
	name string
	port uint16 // of its addresses; 0: its SRV records say
}

// parseDNS reads dns://name:port or dns+srv://name.
func parseDNS(value string) (q dnsQuestion, err error) {
	if name, srv := strings.CutPrefix(value, schemeSRV); srv {
		if !isName(name) {
			return q, fmt.Errorf("--discovery %s: give dns+srv:// and the full name of the SRV records, such as dns+srv://_http._tcp.vllm.ns; the port is in them", value)
		}
		return dnsQuestion{name: name}, nil
	}
	name, port, err := net.SplitHostPort(strings.TrimPrefix(value, schemeDNS))
	number, bad := strconv.ParseUint(port, 10, 16)
	if err != nil || bad != nil || number == 0 || !isName(name) {
		return q, fmt.Errorf("--discovery %s: give dns:// with a name and the workers' port, such as dns://vllm.ns:8100; for SRV records, which have the port, dns+srv://_http._tcp.vllm.ns", value)
	}
	return dnsQuestion{name, uint16(number)}, nil
}

// isName tells whether name servers can be asked for it.
func isName(name string) bool {
	return name != "" && len(name) <= 253 && !strings.ContainsAny(name, "/:?#@ ")
}

// dnsSource asks name servers for the workers.
type dnsSource struct {
	dnsQuestion
	resolver *net.Resolver
	every    time.Duration
	keep     time.Duration
	trouble  trouble
}

func openDNS(value string, log *slog.Logger) (*dnsSource, error) {
	q, err := parseDNS(value)
	return &dnsSource{dnsQuestion: q, resolver: net.DefaultResolver, every: dnsEvery, keep: dnsKeep, trouble: trouble{log: log, what: "--discovery " + value}}, err
}

// Watch sends the workers that name servers name.
func (d *dnsSource) Watch(ctx context.Context) <-chan []kv.Worker {
	out := make(chan []kv.Worker)
	go func() { // until ctx ends
		defer close(out)
		tick := time.NewTicker(d.every)
		defer tick.Stop()
		var known []kv.Worker
		for confirmed := time.Now(); ; {
			list, err := d.ask(ctx)
			switch {
			case ctx.Err() != nil:
				return
			case err == nil:
				confirmed = time.Now()
				d.trouble.over()
			case len(known) == 0:
				d.trouble.is(err, "no worker is known")
				list = nil
			case time.Since(confirmed) < d.keep:
				d.trouble.is(err, fmt.Sprintf("%s, for %s at most", keptAsKnown, d.keep))
				list = known
			default:
				d.trouble.is(fmt.Errorf("%w, for %s", err, d.keep), "its workers are let go")
				list = nil
			}
			if !slices.Equal(list, known) {
				if !send(ctx, out, list) {
					return
				}
				known = list
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return out
}

// errEmpty is an answer that names nobody.
var errEmpty = errors.New("the answer names no address")

// ask asks once. It fails with errEmpty, or why no answer can be had.
func (d *dnsSource) ask(ctx context.Context) (list []kv.Worker, err error) {
	ctx, cancel := context.WithTimeout(ctx, dnsLimit)
	defer cancel()
	if d.port != 0 {
		addresses, err := d.addresses(ctx, d.name)
		if err != nil {
			return nil, err
		}
		for _, address := range addresses {
			list = append(list, dnsWorker(address, d.port, ""))
		}
	} else if list, err = d.services(ctx); err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, errEmpty
	}
	if len(list) > maxWorkers {
		return nil, fmt.Errorf("the answer names %d workers, at most %d may be", len(list), maxWorkers)
	}
	byName(list)
	return slices.CompactFunc(list, func(a, b kv.Worker) bool { return a.ID == b.ID }), nil
}

// services asks for the SRV records, and for the addresses of their hosts.
func (d *dnsSource) services(ctx context.Context) (list []kv.Worker, err error) {
	_, records, err := d.resolver.LookupSRV(ctx, "", "", d.name)
	if err != nil {
		return nil, plain(err)
	}
	if len(records) > maxWorkers {
		return nil, fmt.Errorf("the answer has %d SRV records, at most %d may be", len(records), maxWorkers)
	}
	found := make([][]netip.Addr, len(records))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(dnsMost)
	for i, record := range records {
		group.Go(func() (err error) {
			found[i], err = d.addresses(ctx, record.Target)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for i, record := range records {
		name := ""
		if len(found[i]) == 1 { // else it is no worker's own
			name = net.JoinHostPort(strings.TrimSuffix(record.Target, "."), fmt.Sprint(record.Port))
		}
		for _, address := range found[i] {
			list = append(list, dnsWorker(address, record.Port, name))
		}
	}
	return list, nil
}

// addresses asks for the addresses of a host.
func (d *dnsSource) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	addresses, err := d.resolver.LookupNetIP(ctx, "ip", host)
	return addresses, plain(err)
}

// plain is an error of the resolver without the name server's address, which may be
// another at each question.
func plain(err error) error {
	var failed *net.DNSError
	if errors.As(err, &failed) {
		return fmt.Errorf("%s: %s", failed.Name, failed.Err)
	}
	return err
}

// dnsWorker is the worker at an address; name may be empty.
func dnsWorker(address netip.Addr, port uint16, name string) kv.Worker {
	base := baseURL(address.Unmap().WithZone("").String(), port)
	if name == "" {
		name = hostPort(base)
	}
	return kv.Worker{ID: idOf(base), Name: name, URL: base, EventsPort: eventsPort}
}
