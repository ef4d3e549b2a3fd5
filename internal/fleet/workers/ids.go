package workers

import (
	"fmt"
	"net"
	"net/url"
)

// AssignIDs gives attached workers without an id the next free one, in their order;
// started workers have the ids from 0 on. An error names an id or a URL that is used
// twice, with the flag.
func AssignIDs(attached []Attached, started int) error {
	taken := map[uint64]string{}
	for id := range started {
		taken[uint64(id)] = "a started worker"
	}
	urls := map[string]string{}
	for _, w := range attached {
		server := serverAt(w.URL)
		if other, dup := urls[server]; dup {
			return fmt.Errorf("worker %s is given twice%s", w.URL, alias(other, w.URL))
		}
		urls[server] = w.URL
		if !w.HasID {
			continue
		}
		if owner, dup := taken[w.ID]; dup {
			return fmt.Errorf("--worker id=%d,url=%s: id %d belongs to %s; choose another or leave it out", w.ID, w.URL, w.ID, owner)
		}
		taken[w.ID] = w.URL
	}
	var next uint64
	for i := range attached {
		w := &attached[i]
		if w.HasID {
			continue
		}
		for taken[next] != "" {
			next++
		}
		w.ID = next
		taken[next] = w.URL
	}
	return nil
}

// alias says that two URLs are of one server; empty: they are equal.
func alias(first, second string) string {
	if first == second {
		return ""
	}
	return fmt.Sprintf(": %s is the same server", first)
}

// serverAt is a URL with its host as oneName has it.
func serverAt(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return text
	}
	u.Host = net.JoinHostPort(oneName(u.Hostname()), u.Port())
	return u.String()
}
