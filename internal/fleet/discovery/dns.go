package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/base/kv"
)

// Times of DNS. Go's resolver reports no TTL and caches nothing: it is asked at a fixed
// pace, and the caches of name servers on the way keep to the TTL.
const (
	dnsEvery = 5 * time.Second // between questions
	dnsLimit = 4 * time.Second // longest wait for all answers to one
	dnsKeep  = 5 * time.Minute // how long workers are kept while answers are empty
	dnsMost  = 16              // questions at once about the hosts of SRV records
	dnsMiss  = 3               // answers in a row that leave a worker out, until it goes
)

// dnsQuestion is the DNS query of --discovery.
type dnsQuestion struct {
	name string
	port uint16 // of its addresses; 0: its SRV records say
}

// parseDNS reads dns://name:port or dns+srv://name.
func parseDNS(value string) (q dnsQuestion, err error) {
	if name, srv := strings.CutPrefix(value, schemeSRV); srv {
		if !isName(name) {
			return q, fmt.Errorf("--discovery %s: give dns+srv:// and the full name of the SRV records, such as dns+srv://_http._tcp.vllm.ns; "+
				"the port is in them", value)
		}
		return dnsQuestion{name: name}, nil
	}
	name, port, err := net.SplitHostPort(strings.TrimPrefix(value, schemeDNS))
	number, ok := kv.ParsePort(port)
	if err != nil || !ok || !isName(name) {
		return q, fmt.Errorf("--discovery %s: give dns:// with a name and the workers' port, such as dns://vllm.ns:8100; for SRV records, "+
			"which have the port, dns+srv://_http._tcp.vllm.ns", value)
	}
	return dnsQuestion{name, number}, nil
}

// isName reports whether it is a valid DNS name.
func isName(name string) bool {
	return name != "" && len(name) <= 253 && !strings.ContainsAny(name, "/:?#@ ")
}

// dnsSource queries name servers for the workers.
type dnsSource struct {
	dnsQuestion
	kind     string // of target, for messages: worker or router
	resolver *net.Resolver
	every    time.Duration
	keep     time.Duration
	trouble  trouble
	hosts    map[string][]netip.Addr // of the SRV records, as answered last
	missed   map[uint64]int          // answers in a row that leave a known worker out
	crowded  bool                    // more addresses than allowed; already logged
}

func openDNS(value string, log *slog.Logger) (*dnsSource, error) {
	q, err := parseDNS(value)
	return newDNS(q, "worker", "--discovery "+value, log), err
}

// newDNS returns a source that queries q; what is the flag with its value.
func newDNS(q dnsQuestion, kind, what string, log *slog.Logger) *dnsSource {
	return &dnsSource{dnsQuestion: q, kind: kind, resolver: net.DefaultResolver, every: dnsEvery, keep: dnsKeep,
		trouble: trouble{log: log, what: what}}
}

// Watch sends the workers of the name servers' answers.
func (d *dnsSource) Watch(ctx context.Context) <-chan []kv.Worker {
	return startWatch(ctx, func(send func([]kv.Worker) bool) {
		var known []kv.Worker
		var emptySince time.Time // since when answers are empty; zero: they are not
		for more := true; more; more = more && sleep(ctx, d.every) {
			list, err := d.ask(ctx)
			if len(list) > 0 || !isEmpty(err) {
				emptySince = time.Time{}
			} else if emptySince.IsZero() {
				emptySince = time.Now()
			}
			switch {
			case ctx.Err() != nil:
				return
			case len(list) > 0:
				list = d.settled(list, known)
				if err != nil {
					d.trouble.is(err, "the other addresses of the answer are used")
				} else {
					d.trouble.over()
				}
			case len(known) == 0:
				d.trouble.is(err, fmt.Sprintf("no %s is known", d.kind))
			case emptySince.IsZero():
				d.trouble.is(err, fmt.Sprintf("the %ss are kept", d.kind))
				list = known
			case time.Since(emptySince) < d.keep:
				d.trouble.is(err, fmt.Sprintf("the %ss are kept, for %s at most", d.kind, d.keep))
				list = known
			default:
				d.trouble.is(fmt.Errorf("%w, for %s", err, d.keep), fmt.Sprintf("its %ss are removed", d.kind))
				clear(d.missed)
			}
			if !slices.Equal(list, known) {
				more, known = send(list), list
			}
		}
	})
}

// dnsError is the fault of an answer.
type dnsError struct {
	text  string
	empty bool // name servers answer without an address
}

func (e dnsError) Error() string { return e.text }

// isEmpty reports whether an answer came that is empty: unlike silence, it may be
// true.
func isEmpty(err error) bool {
	var failed dnsError
	return errors.As(err, &failed) && failed.empty
}

// settled is an answer with the known workers that it leaves out, until dnsMiss answers
// in a row do: name servers answer in part when one of them is behind, or has no room.
func (d *dnsSource) settled(list, known []kv.Worker) []kv.Worker {
	missed := map[uint64]int{}
	for _, w := range known {
		if slices.ContainsFunc(list, func(now kv.Worker) bool { return now.ID == w.ID }) {
			continue
		}
		if n := d.missed[w.ID] + 1; n < dnsMiss && len(list) < maxWorkers {
			missed[w.ID] = n
			list = append(list, w)
		}
	}
	d.missed = missed
	return byName(list)
}

// ask sends one query. An error beside workers names those missing.
func (d *dnsSource) ask(ctx context.Context) (list []kv.Worker, err error) {
	ctx, cancel := context.WithTimeout(ctx, dnsLimit)
	defer cancel()
	if d.port == 0 {
		list, err = d.services(ctx)
	} else {
		var addresses []netip.Addr
		addresses, err = d.addresses(ctx, d.name)
		for _, address := range addresses {
			list = append(list, dnsWorker(address, d.port, ""))
		}
	}
	if len(list) == 0 && err == nil {
		return nil, dnsError{"the answer contains no address", true}
	}
	if len(list) > maxWorkers {
		return nil, fmt.Errorf("the answer contains %d workers, the maximum is %d", len(list), maxWorkers)
	}
	byName(list)
	return slices.CompactFunc(list, func(a, b kv.Worker) bool { return a.ID == b.ID }), err
}

// services queries the SRV records, and the addresses of their hosts. A host that
// is unknown has none; one that cannot be asked for keeps those it had.
func (d *dnsSource) services(ctx context.Context) (list []kv.Worker, err error) {
	_, records, err := d.resolver.LookupSRV(ctx, "", "", d.name)
	if len(records) == 0 {
		return nil, plain(err)
	}
	if len(records) > maxWorkers {
		return nil, fmt.Errorf("the answer has %d SRV records, the maximum is %d", len(records), maxWorkers)
	}
	found, wrong := make([][]netip.Addr, len(records)), make([]error, len(records))
	var total atomic.Int64 // addresses; beyond the maximum no further host is asked for
	var group errgroup.Group
	group.SetLimit(dnsMost)
	for i, record := range records {
		group.Go(func() error {
			if total.Load() > maxWorkers {
				return nil
			}
			found[i], wrong[i] = d.addresses(ctx, record.Target)
			total.Add(int64(len(found[i])))
			return nil
		})
	}
	_ = group.Wait() // none fails
	if total.Load() > maxWorkers {
		return nil, fmt.Errorf("the hosts of the %d SRV records have more than %d addresses, which is the maximum", len(records), maxWorkers)
	}
	hosts := map[string][]netip.Addr{}
	for i, record := range records {
		if wrong[i] != nil && !isEmpty(wrong[i]) {
			found[i] = d.hosts[record.Target]
		}
		hosts[record.Target] = found[i]
		name := ""
		if len(found[i]) == 1 { // else it is no worker's own
			name = net.JoinHostPort(strings.TrimSuffix(record.Target, "."), fmt.Sprint(record.Port))
		}
		for _, address := range found[i] {
			list = append(list, dnsWorker(address, record.Port, name))
		}
	}
	d.hosts = hosts
	return list, together(append(wrong, plain(err)))
}

// together is several errors in one line of bounded length, the same however they are
// ordered; nil: there are none.
func together(all []error) error {
	const most = 3
	var texts []string
	empty := true
	for _, err := range all {
		if err != nil {
			texts = append(texts, err.Error())
			empty = empty && isEmpty(err)
		}
	}
	if len(texts) == 0 {
		return nil
	}
	slices.Sort(texts)
	texts = slices.Compact(texts)
	text := strings.Join(texts[:min(len(texts), most)], ", ")
	if len(texts) > most {
		text += fmt.Sprintf(" and %d more", len(texts)-most)
	}
	return dnsError{text, empty}
}

// addresses queries the addresses of a host.
func (d *dnsSource) addresses(ctx context.Context, host string) (addresses []netip.Addr, err error) {
	// Of two errors the resolver reports one: a missing AAAA record may hide that
	// the question for A records failed. So an empty answer is requested again.
	for _, network := range []string{"ip", "ip4", "ip6"} {
		addresses, err = d.resolver.LookupNetIP(ctx, network, host)
		if err = plain(err); !isEmpty(err) {
			break
		}
	}
	return addresses, err
}

// plain is an error of the resolver without the name server's address, which may be
// another at each question.
func plain(err error) error {
	var failed *net.DNSError
	if errors.As(err, &failed) {
		return dnsError{fmt.Sprintf("%s: %s", failed.Name, failed.Err), failed.IsNotFound}
	}
	return err
}

// dnsWorker is the worker at an address; name may be empty.
func dnsWorker(address netip.Addr, port uint16, name string) kv.Worker {
	base := baseURL(address.Unmap().WithZone("").String(), port)
	return kv.Worker{ID: idOf(base), Name: cmp.Or(plainName(name), hostPort(base)), URL: base, EventsPort: eventsPort}
}
