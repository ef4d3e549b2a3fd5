package batch

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/prompt/hints"
)

const (
	// maxAnswer bounds an answer, bytes: its line is shorter than jsonlines.MaxLine.
	maxAnswer = 32 << 20
	// maxText bounds the part of an answer that is not JSON that is kept, bytes.
	maxText = 4096
)

// errEnd is wrapped by errors that end the run: every other request would fail likewise.
var errEnd = errors.New("the run ends")

// sender sends requests to the endpoint.
type sender struct {
	client *http.Client
	base   string // without /v1
	key    string // empty: none is sent
	limit  time.Duration
}

// newSender checks the address of an OpenAI endpoint.
func newSender(address, key string, limit time.Duration, connections int) (*sender, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("--url %q: give the address of an OpenAI endpoint, such as http://127.0.0.1:8000", address)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns, transport.MaxIdleConnsPerHost = connections, connections
	return &sender{
		client: &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
		base:   strings.TrimSuffix(strings.TrimSuffix(u.String(), "/"), "/v1"), key: key, limit: limit,
	}, nil
}

// attempt is the result of sending a request once.
type attempt struct {
	verdict  verdict
	sent     time.Time
	asked    time.Duration // of Retry-After; 0: none
	response *response     // nil: none came
	failure  *failure      // without a response
}

// ok reports whether it is a result, not an error.
func (a *attempt) ok() bool { return a.failure == nil && a.response.Status/100 == 2 }

// problem returns why an attempt is not ok, in a few words.
func (a *attempt) problem() string {
	if a.failure != nil {
		return a.failure.Message
	}
	return fmt.Sprintf("status %d", a.response.Status)
}

// send sends a request once. An error means that the answer concerns all requests.
func (s *sender) send(ctx context.Context, r *request) (a attempt, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	var connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected.Store(true) }})
	a.sent = time.Now()
	in, err := http.NewRequestWithContext(ctx, http.MethodPost, s.base+r.path, bytes.NewReader(r.body))
	if err != nil {
		return a, err
	}
	in.Header.Set("Content-Type", "application/json")
	in.Header.Set("User-Agent", "kvrouter-batch")
	in.Header.Set(hints.HeaderClass, fair.Batch.String())
	if s.key != "" {
		in.Header.Set("Authorization", "Bearer "+s.key)
	}
	answer, err := s.client.Do(in)
	var body []byte
	if err == nil {
		defer answer.Body.Close()
		body, err = io.ReadAll(io.LimitReader(answer.Body, maxAnswer+1))
	}
	if err != nil {
		a.failure = &failure{Code: codeBroken, Message: shortened(withoutAddress(err).Error())}
		a.verdict = broken
		switch {
		case !connected.Load():
			a.verdict, a.failure.Code = refused, codeUnreachable
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			a.failure = &failure{Code: codeTimeout, Message: fmt.Sprintf("no whole answer within %s (--answer-timeout)", s.limit)}
		}
		return a, nil
	}
	return a, a.judge(answer, body)
}

// judge reads an answer.
func (a *attempt) judge(answer *http.Response, body []byte) error {
	a.response = &response{Status: answer.StatusCode, RequestID: shortened(answer.Header.Get("X-Request-Id")), Body: body}
	valid := json.Valid(body)
	if !valid {
		a.response.Body, _ = json.Marshal(shortened(string(body))) // of a text, it does not fail
	}
	switch status := answer.StatusCode; {
	case status == http.StatusUnauthorized:
		return fmt.Errorf("%w: the endpoint requires a key (401): give one by --api-key or KVROUTER_API_KEY", errEnd)
	case status/100 == 3:
		return fmt.Errorf("%w: the endpoint redirects to %.200q: give that as --url", errEnd, answer.Header.Get("Location"))
	case len(body) > maxAnswer:
		a.response = nil
		a.failure = &failure{Code: codeAnswer, Message: fmt.Sprintf("the answer is longer than %d bytes", maxAnswer)}
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable, status == 529:
		a.verdict, a.asked = refused, retryAfter(answer.Header.Get("Retry-After"), time.Now())
	case status >= 500, status == http.StatusRequestTimeout:
		a.verdict = broken
	case status/100 == 2 && !valid:
		a.failure = &failure{Code: codeAnswer, Message: "the answer is not JSON"}
	}
	return nil
}

// retryAfter reads a Retry-After: seconds, or a date. 0: there is none, or it has passed.
func retryAfter(text string, now time.Time) time.Duration {
	if seconds, err := strconv.ParseFloat(text, 64); err == nil {
		if seconds > 0 { // not NaN
			return time.Duration(min(seconds, longestAsked.Seconds()) * float64(time.Second))
		}
		return 0
	}
	if at, err := http.ParseTime(text); err == nil {
		return max(0, at.Sub(now))
	}
	return 0
}

// withoutAddress returns an error without the address, which the user knows.
func withoutAddress(err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		return wrapped.Err
	}
	return err
}

// shortened cuts a text to maxText bytes of UTF-8.
func shortened(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxText)], "\ufffd")
}

// usage is the tokens of answers as endpoints report them.
type usage struct{ prompt, cached, output int64 }

// maxTokens bounds a reported number of tokens.
const maxTokens = 1 << 40

// usageOf reads the usage of an answer in any of the APIs.
func usageOf(body []byte) usage {
	number := func(names ...string) int64 {
		for _, name := range names {
			if n := gjson.GetBytes(body, "usage."+name); n.Exists() {
				return int64(min(max(n.Float(), 0), maxTokens))
			}
		}
		return 0
	}
	return usage{
		number("prompt_tokens", "input_tokens"),
		number("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens", "cache_read_input_tokens"),
		number("completion_tokens", "output_tokens"),
	}
}

// newID returns the id of a line of the results.
func newID() string { return "batch_req_" + strings.ToLower(rand.Text()) }
