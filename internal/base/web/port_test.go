package web

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// servePort serves a handler on a free port, which the test may drain or close.
func servePort(t *testing.T, handler http.HandlerFunc) *Port {
	t.Helper()
	return serveListened(t, handler, nil, 64, Stall)
}

// serveListened is servePort with so many connections and that time of stall.
func serveListened(t *testing.T, handler http.HandlerFunc, secure *tls.Config, connections int, stall time.Duration) *Port {
	t.Helper()
	p, err := listen("127.0.0.1", 0, "--http-port", connections, secure, stall)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- p.Serve(handler) }()
	t.Cleanup(func() {
		p.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return p
}

func TestTakenPortIsAnErrorThatNamesItsFlag(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := Listen("127.0.0.1", l.Addr().(*net.TCPAddr).Port, "--router-port", 1, nil); err == nil || !strings.HasPrefix(err.Error(), "--router-port ") {
		t.Errorf("%v", err)
	}
}

func TestPortThatLeavesServesAndEndsConnections(t *testing.T) {
	p := servePort(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "served") })
	get := func() (closes bool) {
		t.Helper()
		response, err := http.Get(p.URL())
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		if text, _ := io.ReadAll(response.Body); string(text) != "served" {
			t.Errorf("%s", text)
		}
		return response.Close
	}
	if get() {
		t.Error("a connection ends before the port leaves")
	}
	p.Leave()
	for range 2 { // the kept connection, and a new one
		if !get() {
			t.Error("a connection is kept by a port that leaves")
		}
	}
}

func TestDrainLetsRequestsFinish(t *testing.T) {
	arrived, goOn := make(chan bool), make(chan bool)
	p := servePort(t, func(w http.ResponseWriter, r *http.Request) {
		arrived <- true
		<-goOn
		if r.Context().Err() != nil {
			t.Error("the request was cut")
		}
		io.WriteString(w, "whole")
	})
	answers := make(chan string, 1)
	go func() {
		response, err := http.Get(p.URL())
		if err != nil {
			answers <- err.Error()
			return
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		answers <- fmt.Sprint(string(text), response.Close)
	}()
	<-arrived
	whole := make(chan bool, 1)
	go func() { whole <- p.Drain(20 * time.Second) }()
	refused := func() bool {
		conn, err := net.DialTimeout("tcp", strings.TrimPrefix(p.URL(), "http://"), time.Second)
		if err == nil {
			conn.Close()
		}
		return err != nil
	}
	for deadline := time.Now().Add(10 * time.Second); !refused(); {
		if time.Now().After(deadline) {
			t.Fatal("a port that drains takes new connections")
		}
	}
	close(goOn)
	if got := <-answers; got != "wholetrue" {
		t.Errorf("answer and end of the connection: %q", got)
	}
	if !<-whole {
		t.Error("it says that requests were cut")
	}
}

// TestDrainWaitsForHijackedConnections, and cuts those that take too long.
func TestDrainWaitsForHijackedConnections(t *testing.T) {
	for _, whole := range []bool{true, false} {
		arrived, goOn, cut := make(chan bool), make(chan bool), make(chan bool, 1)
		p := servePort(t, func(w http.ResponseWriter, r *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			arrived <- true
			select {
			case <-goOn:
			case <-r.Context().Done():
				cut <- errors.Is(context.Cause(r.Context()), ErrStopped)
			}
			io.WriteString(conn, "end")
		})
		conn, err := net.Dial("tcp", strings.TrimPrefix(p.URL(), "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		<-arrived
		drained := make(chan bool, 1)
		limit := time.Duration(0)
		if whole {
			limit = 20 * time.Second
		}
		go func() { drained <- p.Drain(limit) }()
		if whole {
			select {
			case <-drained:
				t.Error("it does not wait")
			case <-time.After(100 * time.Millisecond):
			}
			close(goOn)
		} else if !<-cut {
			t.Error("the request does not learn why it is cut")
		}
		if text, err := io.ReadAll(conn); string(text) != "end" || err != nil {
			t.Errorf("%q, %v", text, err)
		}
		if <-drained != whole {
			t.Errorf("whole: %v", !whole)
		}
		conn.Close()
	}
}

func TestDrainCutsWhatTakesTooLong(t *testing.T) {
	arrived := make(chan bool)
	p := servePort(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "data: 1\n\n")
		http.NewResponseController(w).Flush()
		arrived <- true
		<-r.Context().Done()
		if !errors.Is(context.Cause(r.Context()), ErrStopped) {
			t.Errorf("cause %v", context.Cause(r.Context()))
		}
		fmt.Fprint(w, "data: told\n\n")
	})
	response, err := http.Get(p.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	<-arrived
	if p.Drain(0) {
		t.Error("it says that none was cut")
	}
	if text, err := io.ReadAll(response.Body); err != nil || string(text) != "data: 1\n\ndata: told\n\n" {
		t.Errorf("%q, %v", text, err)
	}
}

// TestDrainEndsWithAHandlerThatDoesNot: nothing that a request does may keep the
// process.
func TestDrainEndsWithAHandlerThatDoesNot(t *testing.T) {
	arrived, end := make(chan bool), make(chan bool)
	p := servePort(t, func(http.ResponseWriter, *http.Request) {
		arrived <- true
		<-end
	})
	defer close(end)
	conn, err := net.Dial("tcp", strings.TrimPrefix(p.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	<-arrived
	began := time.Now()
	if p.Drain(0) || time.Since(began) > cutTime+5*time.Second {
		t.Errorf("after %s", time.Since(began))
	}
	if _, err := bufio.NewReader(conn).ReadByte(); err == nil {
		t.Error("its client got an answer")
	}
}
