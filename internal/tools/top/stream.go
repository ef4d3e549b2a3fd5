package top

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"

	"kvrouter/internal/serve/page"
)

// Bounds of a stream.
const (
	maxEvent    = 16 << 20 // bytes of one event
	maxWorkers  = 8192
	maxRequests = 200
	maxTenants  = 100
	maxModels   = 64
	maxText     = 200 // characters of a text
)

// Times of the stream.
const (
	answerWait = 10 * time.Second       // longest that the router may take to begin its answer
	silence    = 10 * time.Second       // a stream without a byte for that time counts as lost
	firstPause = 500 * time.Millisecond // before the first try after a stream was lost
	maxPause   = 10 * time.Second       // each further pause is twice as long, at most this
)

// update is one result of follow: a state, or the error in its place.
type update struct {
	state   *page.State
	problem error
	again   time.Duration // with problem: until the next try
}

// source is the stream of a router port.
type source struct {
	url, key            string
	client              *http.Client
	silence, firstPause time.Duration
}

// follow reads the stream, again and again with growing pauses, until ctx is done.
func (s *source) follow(ctx context.Context, emit func(update)) {
	pause := s.firstPause
	for {
		err := s.read(ctx, func(state *page.State) {
			pause = s.firstPause
			emit(update{state: state})
		})
		if ctx.Err() != nil {
			return
		}
		emit(update{problem: err, again: pause})
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxPause)
	}
}

// read reads the stream once, until it ends; it always returns why.
func (s *source) read(ctx context.Context, emit func(*page.State)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return err
	}
	request.Header.Set("Accept", "text/event-stream")
	if s.key != "" {
		request.Header.Set("Authorization", "Bearer "+s.key)
	}
	response, err := s.client.Do(request)
	if err != nil {
		var wrapped *url.Error
		if errors.As(err, &wrapped) { // its text begins with the address, which the reader knows
			err = wrapped.Err
		}
		return err
	}
	defer response.Body.Close()
	if err := refusal(response.StatusCode); err != nil {
		return err
	}
	quiet := time.AfterFunc(s.silence, func() { cancel(fmt.Errorf("no data received for %s", s.silence)) })
	defer quiet.Stop()
	err = readEvents(response.Body, func() { quiet.Reset(s.silence) }, func(event string, data []byte) error {
		if event != "state" {
			return nil
		}
		state, err := decodeState(data)
		if err != nil {
			return err
		}
		emit(state)
		return nil
	})
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// refusal says what an answer's status means, if it is no stream.
func refusal(status int) error {
	switch status {
	case http.StatusOK:
		return nil
	case http.StatusUnauthorized, http.StatusForbidden:
		return errors.New("the router requires a key: give one of its --router-api-key")
	case http.StatusNotFound:
		return errors.New("not found (404): is this the router port of a kvrouter?")
	case http.StatusServiceUnavailable:
		return errors.New("the router has too many viewers, or is shutting down (503)")
	}
	return fmt.Errorf("the router answered with status %d", status)
}

// readEvents reads server-sent events until the stream ends, and hands each on.
// alive is called with every line. The error is never nil: io.EOF is a proper end.
func readEvents(r io.Reader, alive func(), emit func(event string, data []byte) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxEvent)
	event, data := "", []byte(nil)
	for lines.Scan() {
		alive()
		line := lines.Bytes()
		if len(line) == 0 {
			if len(data) > 0 {
				if err := emit(event, data); err != nil {
					return err
				}
			}
			event, data = "", data[:0]
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "event":
			event = cleanText(string(value[:min(len(value), maxText)]))
		case "data":
			if len(data)+len(value) > maxEvent {
				return bufio.ErrTooLong
			}
			data = append(data, value...)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return io.EOF
}

// decodeState reads a state and makes it fit to be shown: bounded, and its texts
// without anything that a terminal would obey.
func decodeState(data []byte) (*page.State, error) {
	var wire struct {
		page.State
		Cache struct{} `json:"cache"` // is not shown here
	}
	if err := json.Unmarshal(data, &wire); err != nil {
		return nil, errors.New("cannot read the router's state: it may be of another version")
	}
	s := &wire.State
	s.Workers = s.Workers[:min(len(s.Workers), maxWorkers)]
	s.Requests = s.Requests[:min(len(s.Requests), maxRequests)]
	s.Tenants = s.Tenants[:min(len(s.Tenants), maxTenants)]
	s.Models = s.Models[:min(len(s.Models), maxModels)]
	for i := range s.Models {
		s.Models[i] = cleanText(s.Models[i])
	}
	clean := func(texts ...*string) {
		for _, text := range texts {
			*text = cleanText(*text)
		}
	}
	clean(&s.Version, &s.Policy)
	for i := range s.Workers {
		w := &s.Workers[i]
		clean(&w.Name, &w.URL, &w.Engine, &w.Role, &w.Model, &w.State, &w.Why)
	}
	for i := range s.Tenants {
		clean(&s.Tenants[i].Tenant)
	}
	for i := range s.Requests {
		r := &s.Requests[i]
		clean(&r.ID, &r.WorkerName, &r.PrefillName, &r.Route, &r.Model, &r.End)
		r.Prompt = ""
	}
	return s, nil
}

// cleanText cuts a text to maxText characters and leaves out those that are not to
// be seen: control characters, with which escape codes begin, and those that turn
// the direction of writing.
func cleanText(text string) string {
	var b strings.Builder
	n := 0
	for _, r := range text {
		if n == maxText {
			break
		}
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			continue
		}
		b.WriteRune(r)
		n++
	}
	return b.String()
}

// clockOf returns the time of Unix seconds, clamped to those that a calendar can
// show.
func clockOf(unix float64) time.Time {
	if math.IsNaN(unix) {
		unix = 0
	}
	return time.UnixMilli(int64(1000 * max(0, min(unix, 253e9))))
}
