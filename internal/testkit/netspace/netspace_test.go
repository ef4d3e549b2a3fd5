package netspace

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// echoing names the address at which this program echoes what comes.
const echoing = "KVROUTER_TEST_NETSPACE_ECHO"

// TestEchoes is the program that runs in a node.
func TestEchoes(t *testing.T) {
	address := os.Getenv(echoing)
	if address == "" {
		t.Skip("it is run by other tests")
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		go io.Copy(conn, conn)
	}
}

// echo starts the program in a node, and returns its process.
func echo(t *testing.T, n *Node) *os.Process {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(path, "-test.run=^TestEchoes$")
	command.Env = append(os.Environ(), echoing+"="+n.Address+":7")
	if err := n.Start(command); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	return command.Process
}

// conversation is a connection to an echo.
type conversation struct {
	net.Conn
	lines *bufio.Reader
	said  int
}

// meet connects to the echo in a node.
func meet(t *testing.T, n *Node) *conversation {
	t.Helper()
	c := &conversation{}
	testkit.Eventually(t, 20*time.Second, "the echo is there", func() (ok bool) {
		conn, err := net.DialTimeout("tcp", n.Address+":7", time.Second)
		c.Conn = conn
		return err == nil
	})
	t.Cleanup(func() { c.Close() })
	c.lines = bufio.NewReader(c)
	return c
}

// say sends a line, and returns how long it took to come back.
func (c *conversation) say(limit time.Duration) (took time.Duration, err error) {
	began := time.Now()
	c.said++
	if err := c.SetDeadline(began.Add(limit)); err != nil {
		return 0, err
	}
	if _, err := fmt.Fprintln(c, c.said); err != nil {
		return 0, err
	}
	for {
		line, err := c.lines.ReadString('\n')
		if err != nil {
			return 0, err
		}
		if line == fmt.Sprintln(c.said) {
			return time.Since(began), nil
		}
	}
}

// shortest is the least of some round trips: of at least 10, and of more while it is over most.
func (c *conversation) shortest(t *testing.T, most time.Duration) time.Duration {
	t.Helper()
	least := time.Hour
	for n, limit := 0, time.Now().Add(20*time.Second); n < 10 || least > most && time.Now().Before(limit); n++ {
		took, err := c.say(10 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		least = min(least, took)
	}
	return least
}

func TestRoundTripsTakeTheirTime(t *testing.T) {
	if !Enter(t) {
		return
	}
	roundTrips := [][]time.Duration{
		{0, 2 * time.Millisecond, 40 * time.Millisecond},
		{0, 0, 0},
		{0, 0, 0},
	}
	n := New(t, roundTrips)
	for i := 1; i < len(roundTrips); i++ {
		echo(t, n.Node(i))
		want := roundTrips[0][i]
		most := want + 10*time.Millisecond
		got := meet(t, n.Node(i)).shortest(t, most)
		t.Logf("round trip to node %d: %v, asked for %v", i, got, want)
		if got < want || got > most {
			t.Errorf("round trip to node %d: %v, asked for %v", i, got, want)
		}
	}
}

func TestACutLinkDropsAllPackets(t *testing.T) {
	if !Enter(t) {
		return
	}
	n := New(t, [][]time.Duration{{0, 0, 0}, {0, 0, 0}, {0, 0, 0}})
	echo(t, n.Node(1))
	echo(t, n.Node(2))
	first, second := meet(t, n.Node(1)), meet(t, n.Node(2))
	n.Cut(0, 1)
	if took, err := first.say(300 * time.Millisecond); err == nil {
		t.Errorf("a line came back over a cut link after %v", took)
	}
	if _, err := second.say(10 * time.Second); err != nil {
		t.Errorf("the other link: %v", err)
	}
	n.Mend(0, 1)
	if _, err := first.say(20 * time.Second); err != nil {
		t.Errorf("the mended link: %v", err)
	}
}

// TestNothingIsLeft: the programs in nodes end with the network, and so do its goroutines, see
// TestMain.
func TestNothingIsLeft(t *testing.T) {
	if !Enter(t) {
		return
	}
	var left *os.Process
	t.Run("network", func(t *testing.T) {
		n := New(t, [][]time.Duration{{0, 0}, {0, 0}})
		command := exec.Command("/proc/self/exe", "-test.run=^TestEchoes$")
		command.Env = append(os.Environ(), echoing+"="+n.Node(1).Address+":7")
		if err := n.Node(1).Start(command); err != nil {
			t.Fatal(err)
		}
		left = command.Process
		meet(t, n.Node(1))
	})
	if t.Failed() || left == nil {
		return
	}
	testkit.Eventually(t, 20*time.Second, "the program in the node has ended", func() bool { return !testkit.ProcessLives(left.Pid) })
	_, _ = left.Wait()
}
