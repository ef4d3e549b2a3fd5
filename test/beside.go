package test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"text/tabwriter"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/testkit"
)

const (
	// atATime is how many routers run beside each other. They mostly wait.
	atATime = 9
	// portsEach is how many ports each may use.
	portsEach = 5
)

// chaosAll reports whether every policy is tested with every fault.
func chaosAll() bool { return os.Getenv("KVROUTER_CHAOS") != "" }

// beside runs a subtest for each of n, atATime of them at a time, with portsEach ports for
// each, and prints the rows that they return below the heads.
func beside(t *testing.T, heads string, n int, run func(i int) (name string, test func(t *testing.T, port int) (row string))) {
	t.Helper()
	rows := make([]string, n)
	together(t, n, atATime, func(i int) (string, func(t *testing.T, port int)) {
		name, test := run(i)
		return name, func(t *testing.T, port int) { rows[i] = test(t, port) }
	})
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, heads)
	for _, row := range rows {
		fmt.Fprintln(table, row)
	}
	table.Flush()
	t.Logf("\n%s", &text)
}

// together runs a subtest for each of n, most of them at a time, with portsEach ports for
// each that are its own while it runs.
func together(t *testing.T, n, most int, run func(i int) (name string, test func(t *testing.T, port int))) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	first := testkit.FreePorts(t, portsEach*most)
	ports := make(chan int, most)
	for i := range most {
		ports <- first + portsEach*i
	}
	var pool errgroup.Group
	pool.SetLimit(most)
	for i := range n {
		name, test := run(i)
		pool.Go(func() error {
			port := <-ports
			defer func() { ports <- port }()
			t.Run(name, func(t *testing.T) { test(t, port) })
			return nil
		})
	}
	_ = pool.Wait()
}
