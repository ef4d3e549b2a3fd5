package outlier

import (
	"fmt"
	"log/slog"
	"time"

	"kvrouter/internal/kv"
)

// News is the ejection of a worker, its return, an ejection that was not allowed, or that a
// client is discredited.
type News struct {
	Worker kv.WorkerKey
	Client string // that is discredited; empty: none is
	Out    bool
	Spared bool // it would be out, but as many are as may be
	Kind   Kind
	For    time.Duration // how long it will be out, or was
	Why    string
}

// Log writes the news; its worker, if it has one, is called so.
func (n News) Log(log *slog.Logger, called string) {
	if n.Client != "" {
		log.Warn("client "+n.Client+": its requests fail at several workers where others' succeed; for now its failures are not counted against workers", "for", n.For)
		return
	}
	name := "worker " + called
	if n.Worker.Rank > 0 {
		name = fmt.Sprintf("worker %s rank %d", called, n.Worker.Rank)
	}
	switch {
	case n.Spared:
		log.Warn(fmt.Sprintf("%s: not ejected, because as many workers are as --max-ejection-percent allows: %s", name, n.Why), "reason", n.Kind.String())
	case !n.Out:
		log.Info(name+": returned to service", "after", n.For.Round(time.Millisecond), "reason", n.Kind.String())
	case n.Kind == Misconfigured:
		log.Error(fmt.Sprintf("%s: MISCONFIGURED: %s; ejected for %s: check its key, its model name and its routes", name, n.Why, n.For), "reason", n.Kind.String())
	default:
		log.Warn(fmt.Sprintf("%s: ejected for %s: %s", name, n.For, n.Why), "reason", n.Kind.String())
	}
}

// maxNews bounds the news not yet taken.
const maxNews = 256

func (d *Detector) tell(n News) {
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
