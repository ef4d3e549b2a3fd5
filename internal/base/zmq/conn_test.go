package zmq

import (
	"bytes"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

func TestZMQConnReadsLargeMessagesOverIPC(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	large := bytes.Repeat([]byte("0123456789abcdef"), 3<<16)
	ended := make(chan error, 1)
	go func() { // ends when the message is sent
		ended <- func() error {
			raw, err := l.Accept()
			if err != nil {
				return err
			}
			conn, err := zmq4.Open(raw, null.Security(), zmq4.Pub, nil, true, nil)
			if err != nil {
				return err
			}
			if _, err := conn.RecvMsg(); err != nil {
				return err
			}
			return conn.SendMsg(zmq4.NewMsgFrom([]byte("topic"), nil, large, []byte("end")))
		}()
	}()
	c, err := DialSub(t.Context(), "ipc://"+path, "topic")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if ready, err := c.Wait(time.Now().Add(10 * time.Second)); !ready || err != nil {
		t.Fatal(ready, err)
	}
	frames, err := c.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if len(frames) != 4 || string(frames[0]) != "topic" || len(frames[1]) != 0 || !bytes.Equal(frames[2], large) || string(frames[3]) != "end" {
		t.Errorf("%d frames", len(frames))
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
