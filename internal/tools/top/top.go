// Package top is a live view of workers and requests in a terminal. It reads the
// event stream of the dashboard.
package top

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"kvrouter/internal/serve/page"
)

// Command is kvrouter top.
type Command struct {
	RouterURL string `group:"Top" name:"router-url" default:"http://127.0.0.1:7000" help:"Router port of the router to show."`
	Once      bool   `group:"Top" help:"Print one frame as plain text and exit, for scripts and without a terminal."`

	RouterAPIKey []string `group:"Top" name:"router-api-key" placeholder:"KEY" help:"Bearer key of the router port. Of several, separated by commas, the first is sent."`
}

// onceWait is how long --once waits for the first state.
const onceWait = 15 * time.Second

// plainWidth is how wide --once writes where $COLUMNS does not say, in columns.
const plainWidth = 160

// Run shows the router until the user quits or ctx is done; with --once it writes
// one frame to out.
func (c Command) Run(ctx context.Context, out *os.File) error {
	key := ""
	if len(c.RouterAPIKey) > 0 {
		key = c.RouterAPIKey[0]
	}
	source, err := newSource(c.RouterURL, key)
	if err != nil {
		return err
	}
	defer source.client.CloseIdleConnections()
	if c.Once {
		width, err := strconv.Atoi(os.Getenv("COLUMNS"))
		if err != nil || width < minWidth || width > 1000 {
			width = plainWidth
		}
		return once(ctx, source, width, out)
	}
	if info, err := out.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return errors.New("top: the output is not a terminal; --once prints one frame")
	}
	return watch(ctx, source, tea.WithOutput(out))
}

// newSource checks the address of a router port.
func newSource(address, key string) (*source, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil {
		return nil, fmt.Errorf("--router-url %q: give the address of a router port, such as http://127.0.0.1:7000", address)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.ResponseHeaderTimeout = answerWait
	return &source{
		url: strings.TrimSuffix(u.String(), "/") + "/ui/stream", key: key, silence: silence, firstPause: firstPause,
		client: &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	}, nil
}

// once writes the first state to out.
func once(ctx context.Context, s *source, width int, out io.Writer) error {
	ctx, stop := context.WithTimeout(ctx, onceWait)
	defer stop()
	var first *page.State
	err := s.read(ctx, func(state *page.State) {
		if first == nil {
			first = state
			stop()
		}
	})
	if first == nil {
		return fmt.Errorf("top: %s: %s", s.url, cleanText(err.Error()))
	}
	text, _ := frame{width: width, state: first, plain: true, zone: time.Local}.draw()
	_, err = io.WriteString(out, text)
	return err
}

// watch shows the stream in the terminal until a person quits or ctx is done.
func watch(ctx context.Context, s *source, options ...tea.ProgramOption) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	program := tea.NewProgram(&model{frame: frame{url: s.url, zone: time.Local}}, append(options, tea.WithContext(ctx))...)
	done := make(chan struct{})
	go func() { // until ctx is done
		defer close(done)
		s.follow(ctx, func(u update) { program.Send(u) })
	}()
	_, err := program.Run()
	ended := ctx.Err() != nil
	stop()
	<-done
	if ended || errors.Is(err, tea.ErrInterrupted) {
		return nil
	}
	return err
}
