package events

import (
	"cmp"
	"fmt"
)

// DefaultModel and DefaultGroup are the model and group of requests and workers
// that name none.
const (
	DefaultModel = "default"
	DefaultGroup = "default"
)

// Partition restricts a request to the workers of a model (empty in a request: any)
// and a routing group. All partitions of a router share its index, its queue and
// its block size.
type Partition struct{ Model, Group string }

// String returns the partition's name in errors.
func (p Partition) String() string {
	return fmt.Sprintf("model=%s routing_group=%s", cmp.Or(p.Model, DefaultModel), p.Group)
}

// DumpName returns the partition's name in a dump, MODEL:GROUP.
func (p Partition) DumpName() string { return p.Model + ":" + p.Group }
