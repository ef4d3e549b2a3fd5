// Package netspace gives a test a network of its own: nodes with an address each, in network
// namespaces, and a delay between each two. The kernel needs TUN devices and user namespaces, and
// neither root nor a tool is needed.
//
// Enter runs a test again in a process of its own namespaces. There New makes the nodes: the
// process itself is node 0, and Node.Start starts programs in the others. All IP packets between
// them go through that process, which delays or drops them.
package netspace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

const (
	// underWay bounds the packets on the way from one node to another: more are dropped, as by
	// a full router.
	underWay = 4096
	// largestPacket is the size of a TUN device's packets at most, bytes.
	largestPacket = 1500
	// mostNodes is the number of values of an address's last byte.
	mostNodes = 250
)

// Network is nodes with links between each two of them. It is safe for concurrent use.
type Network struct {
	nodes []*Node
	links [][]*link // from the first node to the second one
	end   chan struct{}

	carrying sync.WaitGroup
}

// Node is a network namespace with an address.
type Node struct {
	Address string // IPv4, the same for all other nodes

	device *os.File
	calls  chan func() // run by the thread in its namespace; nil: node 0
	end    <-chan struct{}
}

// link is the way from one node to another.
type link struct {
	delay time.Duration
	cut   atomic.Bool
	queue chan packet
}

// packet is on its way.
type packet struct {
	data []byte
	due  time.Time
}

// New makes a network of nodes with these round-trip times, of which those from the first node
// to the second one count where the first is less: roundTrips[0][1], not [1][0]. The test must be
// one that Enter runs, and is skipped where a namespace or a TUN device is refused. The network
// ends with the test: programs that were started in it must have ended before.
func New(t testing.TB, roundTrips [][]time.Duration) *Network {
	t.Helper()
	if len(roundTrips) > mostNodes {
		t.Fatalf("%d nodes: at most %d", len(roundTrips), mostNodes)
	}
	n := &Network{end: make(chan struct{})}
	t.Cleanup(n.close)
	for i := range roundTrips {
		node, err := n.add(i)
		if errors.Is(err, errRefused) {
			t.Skipf("node %d: %v", i, err)
		} else if err != nil {
			t.Fatalf("node %d: %v", i, err)
		}
		n.nodes = append(n.nodes, node)
	}
	for from := range roundTrips {
		n.links = append(n.links, make([]*link, len(roundTrips)))
		for to := range roundTrips {
			way := &link{delay: roundTrips[min(from, to)][max(from, to)] / 2, queue: make(chan packet, underWay)}
			n.links[from][to] = way
			if from != to {
				n.carrying.Go(func() { n.deliver(way, n.nodes[to].device) })
			}
		}
	}
	for from, node := range n.nodes {
		n.carrying.Go(func() { n.collect(from, node.device) })
	}
	return n
}

// Node returns node i.
func (n *Network) Node(i int) *Node { return n.nodes[i] }

// Cut drops all packets between two nodes from now on, and those that are on their way.
func (n *Network) Cut(a, b int) { n.cut(a, b, true) }

// Mend ends a cut.
func (n *Network) Mend(a, b int) { n.cut(a, b, false) }

func (n *Network) cut(a, b int, cut bool) {
	n.links[a][b].cut.Store(cut)
	n.links[b][a].cut.Store(cut)
}

// Start starts a program in the node. The kernel ends it when the network ends, or the test's
// process.
func (n *Node) Start(command *exec.Cmd) (err error) {
	if n.calls == nil {
		return command.Start()
	}
	if command.SysProcAttr == nil {
		command.SysProcAttr = &syscall.SysProcAttr{}
	}
	command.SysProcAttr.Pdeathsig = syscall.SIGKILL
	done := make(chan struct{})
	select {
	case n.calls <- func() { err = command.Start(); close(done) }:
		<-done
		return err
	case <-n.end:
		return errors.New("the network has ended")
	}
}

// close ends the goroutines and threads, and by that the namespaces.
func (n *Network) close() {
	close(n.end)
	for _, node := range n.nodes {
		_ = node.device.Close()
	}
	n.carrying.Wait()
}

// add makes node i.
func (n *Network) add(i int) (*Node, error) {
	node := &Node{Address: fmt.Sprintf("10.77.0.%d", i+1), end: n.end}
	if i == 0 {
		return node, node.open()
	}
	node.calls = make(chan func())
	made := make(chan error)
	n.carrying.Go(func() { // until the network ends
		onOwnThread(func() {
			err := refused("a network namespace", syscall.Unshare(syscall.CLONE_NEWNET))
			if err == nil {
				err = node.open()
			}
			made <- err
			for err == nil {
				select {
				case call := <-node.calls:
					call()
				case <-n.end:
					return
				}
			}
		})
	})
	return node, <-made
}

// onOwnThread runs f on a thread that ends with it, and with the thread its namespace. That must
// not be the process's first one, which never ends.
func onOwnThread(f func()) {
	runtime.LockOSThread() // and never unlocks it, but the first one
	if syscall.Gettid() != syscall.Getpid() {
		f()
		return
	}
	var other sync.WaitGroup
	other.Go(func() { onOwnThread(f) })
	other.Wait()
	runtime.UnlockOSThread()
}

// collect takes the packets that a node sends, until its device is closed.
func (n *Network) collect(from int, device *os.File) {
	buffer := make([]byte, largestPacket)
	for {
		size, err := device.Read(buffer)
		if err != nil {
			return
		}
		to, ok := receiver(buffer[:size])
		if !ok || to >= len(n.nodes) || to == from {
			continue
		}
		way := n.links[from][to]
		if way.cut.Load() {
			continue
		}
		select {
		case way.queue <- packet{append([]byte(nil), buffer[:size]...), time.Now().Add(way.delay)}:
		default: // it is full
		}
	}
}

// receiver returns the node that an IPv4 packet goes to. Others, such as the solicitations of
// IPv6, go nowhere.
func receiver(data []byte) (node int, ok bool) {
	if len(data) < 20 || data[0]>>4 != 4 || binary.BigEndian.Uint16(data[16:]) != 10<<8|77 || data[18] != 0 {
		return 0, false
	}
	return int(data[19]) - 1, data[19] > 0
}

// deliver hands over what comes over a link, in order, until the network ends.
func (n *Network) deliver(way *link, device *os.File) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-n.end:
			return
		case p := <-way.queue:
			if wait := time.Until(p.due); wait > 0 {
				timer.Reset(wait)
				select {
				case <-n.end:
					return
				case <-timer.C:
				}
			}
			if !way.cut.Load() {
				_, _ = device.Write(p.data) // a node without room drops it
			}
		}
	}
}
