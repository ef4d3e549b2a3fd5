package mocker

import (
	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/kv"
)

// vllmMedia and sglangMedia are where the blocks of an event are, by tier.
var (
	vllmMedia   = [...]string{kv.Device: "GPU", kv.Host: "CPU", kv.Disk: "STORAGE"}
	sglangMedia = [...]string{kv.Device: "GPU", kv.Host: "CPU_PINNED"}
)

// wireTokens are the tokens of an event, most of its bytes: they are written without the
// library's reflection, which takes three times as long.
type wireTokens []uint32

// EncodeMsgpack implements msgpack.CustomEncoder. Writing to a buffer cannot fail.
func (t wireTokens) EncodeMsgpack(p *msgpack.Encoder) error {
	_ = p.EncodeArrayLen(len(t))
	for _, token := range t {
		_ = p.EncodeUint(uint64(token))
	}
	return nil
}

// blocksCleared is AllBlocksCleared of both engines.
type blocksCleared struct {
	Type string `msgpack:"type"`
}

// blocksRemoved is vLLM's BlockRemoved.
type blocksRemoved struct {
	Type   string   `msgpack:"type"`
	Hashes []uint64 `msgpack:"block_hashes"`
	Medium string   `msgpack:"medium"`
	Group  int      `msgpack:"group_idx"`
}

// blocksStored is vLLM's BlockStored.
type blocksStored struct {
	Type      string     `msgpack:"type"`
	Hashes    []uint64   `msgpack:"block_hashes"`
	Parent    *uint64    `msgpack:"parent_block_hash"`
	Tokens    wireTokens `msgpack:"token_ids"`
	BlockSize int        `msgpack:"block_size"`
	LoraID    *int       `msgpack:"lora_id"`
	Medium    string     `msgpack:"medium"`
	LoraName  *string    `msgpack:"lora_name"`
	ExtraKeys [][]string `msgpack:"extra_keys"` // what enters each block's hash beside its tokens
	Group     int        `msgpack:"group_idx"`
	Kind      string     `msgpack:"kv_cache_spec_kind"`
}

// tierStored is vLLM's BlockStored of a lower tier, with the fields that are left out of
// a placeholder and of a tier without a locality.
type tierStored struct {
	Type      string     `msgpack:"type"`
	Hashes    []uint64   `msgpack:"block_hashes"`
	Parent    *uint64    `msgpack:"parent_block_hash"`
	Tokens    wireTokens `msgpack:"token_ids"`
	BlockSize int        `msgpack:"block_size"`
	LoraID    *int       `msgpack:"lora_id"` // never given
	Medium    string     `msgpack:"medium"`
	LoraName  *string    `msgpack:"lora_name"`
	Group     int        `msgpack:"group_idx"`
	Kind      string     `msgpack:"kv_cache_spec_kind,omitempty"`
	Locality  string     `msgpack:"locality,omitempty"`
}

// vllmTierStored is an event of blocks stored in a lower tier as vLLM encodes it.
func vllmTierStored(event *Event, blockSize int) tierStored {
	stored := tierStored{Type: "BlockStored", Medium: vllmMedia[event.Tier], Tokens: wireTokens{}}
	stored.Hashes, stored.Parent = storedHashes[uint64](event)
	if event.Shared {
		stored.Locality = "REMOTE"
	}
	if event.Placeholder {
		stored.Parent = nil
		return stored
	}
	stored.Tokens, stored.BlockSize, stored.Kind = event.Tokens, blockSize, "full_attention"
	if event.Adapter.Name != "" {
		stored.LoraID, stored.LoraName = &event.Adapter.Id, &event.Adapter.Name
	}
	return stored
}

// storedHashes returns the engine hashes of an event's stored blocks and of their parent;
// nil: they have none.
func storedHashes[H int64 | uint64](event *Event) (hashes []H, parent *H) {
	for _, block := range event.Stored {
		hashes = append(hashes, H(block.Engine))
	}
	if event.HasParent {
		parent = new(H)
		*parent = H(event.Parent)
	}
	return hashes, parent
}

// vllmEvent is an event as vLLM encodes it.
func vllmEvent(event *Event, blockSize int) any {
	switch {
	case event.Cleared:
		return blocksCleared{"AllBlocksCleared"}
	case event.Removed != nil:
		return blocksRemoved{Type: "BlockRemoved", Hashes: event.Removed, Medium: vllmMedia[event.Tier]}
	case event.Tier != kv.Device:
		return vllmTierStored(event, blockSize)
	}
	hashes, parent := storedHashes[uint64](event)
	stored := blocksStored{
		Type: "BlockStored", Tokens: event.Tokens, BlockSize: blockSize, Medium: vllmMedia[kv.Device], Kind: "full_attention",
		ExtraKeys: make([][]string, len(event.Stored)), Hashes: hashes, Parent: parent,
	}
	if event.Adapter.Name != "" {
		stored.LoraID, stored.LoraName = &event.Adapter.Id, &event.Adapter.Name
		for i := range stored.ExtraKeys {
			stored.ExtraKeys[i] = []string{event.Adapter.Name}
		}
	}
	if event.Salt != "" {
		stored.ExtraKeys[0] = append(stored.ExtraKeys[0], event.Salt)
	}
	return stored
}

// sglangRemoved is SGLang's BlockRemoved. Its hashes are signed.
type sglangRemoved struct {
	Type   string  `msgpack:"type"`
	Hashes []int64 `msgpack:"block_hashes"`
	Medium string  `msgpack:"medium"`
}

// sglangStored is SGLang's BlockStored.
type sglangStored struct {
	Type      string     `msgpack:"type"`
	Hashes    []int64    `msgpack:"block_hashes"`
	Parent    *int64     `msgpack:"parent_block_hash"`
	Tokens    wireTokens `msgpack:"token_ids"`
	BlockSize int        `msgpack:"block_size"`
	LoraID    *int       `msgpack:"lora_id"` // never given
	Medium    string     `msgpack:"medium"`
	Salt      string     `msgpack:"cache_salt,omitempty"`
	LoraName  string     `msgpack:"lora_name,omitempty"`
}

// sglangEvent is an event as SGLang's scheduler encodes it.
func sglangEvent(event *Event, blockSize int) any {
	switch {
	case event.Cleared:
		return blocksCleared{"AllBlocksCleared"}
	case event.Removed != nil:
		removed := make([]int64, len(event.Removed))
		for i, hash := range event.Removed {
			removed[i] = int64(hash)
		}
		return sglangRemoved{"BlockRemoved", removed, sglangMedia[event.Tier]}
	}
	hashes, parent := storedHashes[int64](event)
	return sglangStored{Type: "BlockStored", Tokens: event.Tokens, BlockSize: blockSize, Medium: sglangMedia[event.Tier], Salt: event.Salt,
		LoraName: event.Adapter.Name, Hashes: hashes, Parent: parent}
}
