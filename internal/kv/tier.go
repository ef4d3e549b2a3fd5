package kv

import "strings"

// Tier is where a worker finds a cached block, from the fastest place on.
type Tier uint8

const (
	// Device is the cache that the engine computes with.
	Device Tier = iota
	// Host is memory of the worker's machine.
	Host
	// Disk is storage of the worker's machine, or files.
	Disk
	// External is a store behind the network.
	External
)

// LowerTiers are the tiers below the device, from the fastest on.
var LowerTiers = [...]Tier{Host, Disk, External}

// tierNames are the values of the label tier in metrics, and of JSON fields.
var tierNames = [...]string{Device: "device", Host: "host", Disk: "disk", External: "external"}

// String returns the tier's name: device, host, disk or external.
func (t Tier) String() string { return tierNames[t] }

// TierOf returns the tier that the medium of a KV event names, in any case; empty is the
// device. It is false for a medium that is not known, whose blocks must not count. The
// names are those of vLLM, SGLang, LMCache and Dynamo.
func TierOf(medium string) (t Tier, known bool) {
	switch strings.ToUpper(medium) {
	case "", "GPU", "DEVICE":
		return Device, true
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return Host, true
	case "DISK", "NVME", "STORAGE", "CPU_TIER2":
		return Disk, true
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		return External, true
	}
	return 0, false
}

// LowerBlocks counts blocks in the tiers below the device.
type LowerBlocks struct{ Host, Disk, External int32 }

// Total returns the blocks of all lower tiers.
func (l LowerBlocks) Total() int { return int(l.Host) + int(l.Disk) + int(l.External) }

// Of returns the blocks of a lower tier; 0 for the device.
func (l LowerBlocks) Of(t Tier) int {
	switch t {
	case Host:
		return int(l.Host)
	case Disk:
		return int(l.Disk)
	case External:
		return int(l.External)
	}
	return 0
}
