package events

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// TestWireSpeed is the measured side of scripts/peers.sh wire: it follows the
// publisher at $KVROUTER_WIRE_SPEED until it holds
// $KVROUTER_WIRE_SPEED_BLOCKS blocks, says so and waits to be killed.
func TestWireSpeed(t *testing.T) {
	endpoint := os.Getenv("KVROUTER_WIRE_SPEED")
	if endpoint == "" {
		t.Skip("run scripts/peers.sh wire")
	}
	want, err := strconv.Atoi(os.Getenv("KVROUTER_WIRE_SPEED_BLOCKS"))
	if err != nil {
		t.Fatal(err)
	}
	worker := kv.WorkerKey{Worker: 1}
	index := radix.NewTree()
	s := NewStream(Source{Worker: worker, Endpoint: endpoint, BlockSize: 16}, index, Options{}, slog.Default())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for said := false; ctx.Err() == nil; <-tick.C {
			if !said && s.Stats().StoredBlocks.Load() >= uint64(want) {
				fmt.Printf("indexed %d\n", index.Blocks(worker))
				said = true
			}
		}
	}()
	s.Run(ctx)
}
