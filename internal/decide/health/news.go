package health

import (
	"fmt"
	"log/slog"
	"time"

	"kvrouter/internal/base/kv"
)

// News is an ejection, a return to service, an ejection that the cap prevented, or a client
// that became discredited.
type News struct {
	Worker kv.WorkerKey
	Client string // that became discredited, or empty
	Out    bool
	Spared bool // only the cap prevented the ejection
	Kind   Kind
	For    time.Duration // duration of the ejection, planned or past
	Why    string
}

// Log writes the news to the log, with name for the worker.
func (n News) Log(log *slog.Logger, called string) {
	if n.Client != "" {
		log.Warn("client "+n.Client+
			": its requests fail on several workers on which others' succeed; its failures are not counted against workers", "for", n.For)
		return
	}
	name := "worker " + called
	if n.Worker.Rank > 0 {
		name = fmt.Sprintf("worker %s rank %d", called, n.Worker.Rank)
	}
	switch {
	case n.Spared:
		log.Warn(fmt.Sprintf("%s: not ejected, because of --max-ejection-percent: %s", name, n.Why), "reason", n.Kind.String())
	case !n.Out:
		log.Info(name+": returned to service", "after", n.For.Round(time.Millisecond), "reason", n.Kind.String())
	case n.Kind == Misconfigured:
		log.Error(fmt.Sprintf("%s: MISCONFIGURED: %s; ejected for %s: check its key, its model name and its routes", name, n.Why, n.For),
			"reason", n.Kind.String())
	default:
		log.Warn(fmt.Sprintf("%s: ejected for %s: %s", name, n.For, n.Why), "reason", n.Kind.String())
	}
}

// maxNews is the maximum number of news that were not taken.
const maxNews = 256

func (d *Detector) announce(n News) {
	if len(d.news) < maxNews {
		d.news = append(d.news, n)
	}
}

// TakeNews returns the news since the last call.
func (d *Detector) TakeNews() []News {
	if len(d.news) == 0 {
		return nil
	}
	news := d.news
	d.news = nil
	return news
}
