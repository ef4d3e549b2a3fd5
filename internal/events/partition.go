package events

import (
	"cmp"
	"fmt"
)

// DefaultModel and DefaultGroup are what requests and workers that name none
// belong to.
const (
	DefaultModel = "default"
	DefaultGroup = "default"
)

// Partition is the common property of a request and the workers it may go to: a
// model (empty in a request: any) and a routing group. All partitions of a
// router share its index, its queue and its block size.
type Partition struct{ Model, Group string }

// String returns the partition as errors name it.
func (p Partition) String() string {
	return fmt.Sprintf("model=%s routing_group=%s", cmp.Or(p.Model, DefaultModel), p.Group)
}

// DumpName returns the partition's name in a dump, MODEL:GROUP.
func (p Partition) DumpName() string { return p.Model + ":" + p.Group }
