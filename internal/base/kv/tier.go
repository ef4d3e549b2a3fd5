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

// Tokens returns the tokens of the blocks of that size.
func (l LowerBlocks) Tokens(blockSize int) TierTokens {
	return TierTokens{Host: int(l.Host) * blockSize, Disk: int(l.Disk) * blockSize, External: int(l.External) * blockSize}
}

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

// Beyond returns the blocks that are left without the first n, the fastest tiers' first.
func (l LowerBlocks) Beyond(n int) LowerBlocks {
	for _, of := range [...]*int32{&l.Host, &l.Disk, &l.External} {
		less := int32(min(max(n, 0), int(*of)))
		*of, n = *of-less, n-int(less)
	}
	return l
}

// Within returns at most n blocks, the fastest tiers' first.
func (l LowerBlocks) Within(n int) LowerBlocks {
	for _, of := range [...]*int32{&l.Host, &l.Disk, &l.External} {
		*of = int32(min(max(n, 0), int(*of)))
		n -= int(*of)
	}
	return l
}

// TierTokens counts cached tokens of a prompt by the tier that they came from.
type TierTokens struct{ Device, Host, Disk, External int }

// Total returns the tokens of all tiers.
func (t TierTokens) Total() int { return t.Device + t.Host + t.Disk + t.External }

// Plus returns the sums of both.
func (t TierTokens) Plus(u TierTokens) TierTokens {
	return TierTokens{t.Device + u.Device, t.Host + u.Host, t.Disk + u.Disk, t.External + u.External}
}

// Of returns the tokens of a tier.
func (t TierTokens) Of(tier Tier) int {
	return [...]int{Device: t.Device, Host: t.Host, Disk: t.Disk, External: t.External}[tier]
}
