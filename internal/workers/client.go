package workers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"syscall"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/web"
)

const (
	// maxProbeBody bounds what is read of a worker's answer to a probe, bytes. An
	// SGLang server tells 20 KB of each of its ranks.
	maxProbeBody = 4 << 20
	// maxProbeHeader bounds its headers, bytes.
	maxProbeHeader = 64 << 10
)

// looksAtOnce bounds the health checks that run side by side, where there are
// descriptors enough: those of workers that have answered before, and the same
// again for all others, so that addresses where nobody answers delay nothing.
const looksAtOnce = 128

// newTransports returns what probes workers, over a new connection each time (a
// look at a worker must not depend on an old one), and what polls their metrics
// pages, which keeps its connections.
func newTransports(config *tls.Config) (probes, polls *http.Transport) {
	probes, polls = web.NewTransport(config), web.NewTransport(config)
	probes.DisableKeepAlives = true
	probes.WriteBufferSize, polls.WriteBufferSize = 0, 0 // they send no bodies: 4 KB, not 64, for each connection
	probes.MaxResponseHeaderBytes, polls.MaxResponseHeaderBytes = maxProbeHeader, maxProbeHeader
	return probes, polls
}

// pageClient returns what asks a worker for its metrics page: it shows the worker
// its key and follows no redirects.
func (f *Fleet) pageClient(w *worker) *http.Client { return web.NewClient(signing{f, w}) }

// signing is a transport that puts a worker's key and this router's name on
// requests to it.
type signing struct {
	f *Fleet
	w *worker
}

// RoundTrip sends the request.
func (s signing) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	s.w.mu.Lock()
	key := s.w.key
	s.w.mu.Unlock()
	s.f.sign(request, key)
	return s.f.polls.RoundTrip(request)
}

// sign puts a worker's key, if there is one, and this router's name on a request.
func (f *Fleet) sign(request *http.Request, key kv.Secret) {
	if key != "" {
		request.Header.Set("Authorization", "Bearer "+string(key))
	}
	f.cfg.Hop.Sign(request.Header)
}

// statusError is an HTTP answer other than 200.
type statusError struct {
	path   string
	status int
}

func (e *statusError) Error() string {
	return fmt.Sprintf("GET %s answered %d %s", e.path, e.status, http.StatusText(e.status))
}

// isStatus tells from the error of a request that it was answered.
func isStatus(err error) bool {
	var status *statusError
	return errors.As(err, &status)
}

// errLeadsBack says that a worker's address is not a worker's.
var errLeadsBack = errors.New("its address leads back to this router: name the address of the worker itself")

// ask sends a GET to a worker, with its key if it has one. A *statusError is an
// answer other than 200, errLeadsBack one of this router's own.
func (f *Fleet) ask(ctx context.Context, at Attached, path string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, at.URL+path, nil)
	if err != nil {
		return nil, fmt.Errorf("GET %s%s: %w", at.URL, path, err)
	}
	f.sign(request, at.Key)
	response, err := f.client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("worker at %s does not answer: %w", at.URL, explainTLS(errors.Unwrap(err)))
	}
	if response.StatusCode == http.StatusOK {
		return response, nil
	}
	_ = response.Body.Close()
	if response.StatusCode == http.StatusLoopDetected {
		return nil, errLeadsBack
	}
	return nil, &statusError{path, response.StatusCode}
}

// get fetches a path of a worker within limit and, unless into is nil, decodes
// its JSON.
func (f *Fleet) get(ctx context.Context, at Attached, path string, limit time.Duration, into any) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	response, err := f.ask(ctx, at, path)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxProbeBody)).Decode(into); err != nil {
		return fmt.Errorf("GET %s%s: the answer is not the JSON that vLLM or SGLang sends: %w", at.URL, path, err)
	}
	return nil
}

// look asks a worker whether it is well, once there is room for another look.
// answered says that it has been well before.
func (f *Fleet) look(ctx context.Context, at Attached, answered bool) error {
	err := f.lookAt(ctx, at, "/health", answered)
	if !answered && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		// An SGLang server computes a token for /health, which takes its time.
		if pinged := f.lookAt(ctx, at, "/ping", answered); !isThere(pinged) {
			return pinged
		}
	}
	return err
}

// lookAt is look at one path.
func (f *Fleet) lookAt(ctx context.Context, at Attached, path string, answered bool) error {
	room := f.firstLooks
	if answered {
		room = f.looks
	}
	select {
	case room <- struct{}{}:
		defer func() { <-room }()
	case <-ctx.Done():
		return ctx.Err()
	}
	return f.get(ctx, at, path, f.Timing.healthLimit, nil)
}

// LeadsBack tells whether a URL is this router itself, as far as that can be told
// within a quarter of a second.
func (f *Fleet) LeadsBack(ctx context.Context, url string) bool {
	return f.cfg.Hop != "" && errors.Is(f.get(ctx, Attached{URL: url}, "/health", f.Timing.selfLimit, nil), errLeadsBack)
}

// isGone tells from the error of a request that no process listens any more,
// as opposed to one that is slow.
func isGone(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED)
}

// mayDrain tells from the error of a look that a server which drains may still answer
// what it has begun: it has closed its door, or says that it is to end.
func mayDrain(err error) bool { return isGone(err) || isStatus(err) }

// isThere tells from the error of a look that a server answers which does not know
// the path, or does not let us ask: whether it is well cannot be told.
func isThere(err error) bool {
	var status *statusError
	return errors.As(err, &status) && status.status/100 == 4
}

// explainTLS adds to the error of a connection with https what to do about it.
func explainTLS(err error) error {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &unknown):
		return fmt.Errorf("%w: give the file of the authority that signed its certificate by --worker-ca", err)
	case errors.As(err, &name):
		return fmt.Errorf("%w: name it in the URL as its certificate does", err)
	case errors.As(err, &invalid):
		return fmt.Errorf("%w: give the worker another certificate", err)
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%w: it does not speak TLS there, write http:// in its URL", err)
	}
	return err
}
