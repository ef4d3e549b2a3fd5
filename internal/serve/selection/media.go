package selection

import (
	"fmt"
	"slices"
)

// mmInfo lists the images and other media in a block, like Dynamo's BlockExtraInfo. Their
// offsets in the block enter no hash.
type mmInfo struct {
	Objects *[]mmObject `json:"mm_objects"`
}

type mmObject struct {
	Hash *uint64 `json:"mm_hash"`
}

// mediaWords converts block_mm_infos to router.Request.Media: sorted, as Dynamo has no
// order among the items of a block. Nil for none.
func mediaWords(infos []*mmInfo) ([][]uint64, error) {
	if len(infos) == 0 {
		return nil, nil
	}
	words := make([][]uint64, len(infos))
	for i, info := range infos {
		if info == nil {
			continue
		}
		if info.Objects == nil {
			return nil, fmt.Errorf("block_mm_infos[%d]: mm_objects is missing: give a list, or null in place of the block's info", i)
		}
		words[i] = make([]uint64, len(*info.Objects))
		for j, o := range *info.Objects {
			if o.Hash == nil {
				return nil, fmt.Errorf("block_mm_infos[%d].mm_objects[%d]: mm_hash is missing: give a number from 0 to 2^64-1", i, j)
			}
			words[i][j] = *o.Hash
		}
		slices.Sort(words[i])
	}
	return words, nil
}
