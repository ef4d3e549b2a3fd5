package tokens

import (
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
)

// What is not understood ends what counts as exact; the items before it count.
func TestRenderedMediaAreUnderstoodOrEndTheExactPart(t *testing.T) {
	photo := kv.Media{Hash: kv.MediaHash("p"), Start: 1, End: 3}
	sound := kv.Media{Hash: kv.MediaHash("s"), Start: 5, End: 6}
	for name, c := range map[string]struct {
		features string // of a prompt of 10 tokens
		media    []kv.Media
		exact    int
	}{
		"none":             {`null`, nil, 10},
		"no items":         {`{"mm_hashes":{"image":[]},"mm_placeholders":{"image":[]}}`, nil, 10},
		"one":              {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":[{"offset":1,"length":2}]},"kwargs_data":null}`, []kv.Media{photo}, 10},
		"in their order":   {`{"mm_hashes":{"audio":["s"],"image":["p"]},"mm_placeholders":{"audio":[{"offset":5,"length":1}],"image":[{"offset":1,"length":2}]}}`, []kv.Media{photo, sound}, 10},
		"modality's name":  {`{"mm_hashes":{"a.b|*":["p"]},"mm_placeholders":{"a.b|*":[{"offset":1,"length":2}]}}`, []kv.Media{photo}, 10},
		"no hashes":        {`{"mm_placeholders":{"image":[{"offset":1,"length":2}]}}`, nil, 1},
		"hash missing":     {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":[{"offset":1,"length":2},{"offset":5,"length":1}]}}`, nil, 1},
		"hash nil":         {`{"mm_hashes":{"image":["p",null]},"mm_placeholders":{"image":[{"offset":1,"length":2},{"offset":5,"length":1}]}}`, []kv.Media{photo}, 5},
		"hash is a number": {`{"mm_hashes":{"image":[1]},"mm_placeholders":{"image":[{"offset":4,"length":2}]}}`, nil, 4},
		"hash empty":       {`{"mm_hashes":{"image":[""]},"mm_placeholders":{"image":[{"offset":4,"length":2}]}}`, nil, 4},
		"no placeholders":  {`{"mm_hashes":{"image":["p"]}}`, nil, 0},
		"placeholders nil": {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":null}}`, nil, 0},
		"other modality":   {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"audio":[{"offset":1,"length":2}]}}`, nil, 0},
		"no offset":        {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":[{"length":2}]}}`, nil, 0},
		"negative offset":  {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":[{"offset":-1,"length":2}]}}`, nil, 0},
		"part of a token":  {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":[{"offset":1.5,"length":2}]}}`, nil, 0},
		"no length":        {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":[{"offset":4,"length":0}]}}`, nil, 4},
		"beyond the end":   {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":[{"offset":4,"length":7}]}}`, nil, 4},
		"far beyond":       {`{"mm_hashes":{"image":["p"]},"mm_placeholders":{"image":[{"offset":4,"length":1e300}]}}`, nil, 4},
		"overlapping":      {`{"mm_hashes":{"image":["p","q","s"]},"mm_placeholders":{"image":[{"offset":1,"length":2},{"offset":4,"length":3},{"offset":5,"length":1}]}}`, []kv.Media{photo}, 4},
		"no object":        {`["mm_hashes"]`, nil, 0},
		"many modalities":  {`{"mm_hashes":{"image":["p"]` + strings.Repeat(`,"x":[]`, maxModalities) + `},"mm_placeholders":{"image":[{"offset":1,"length":2}]}}`, nil, 0},
		"a text":           {`"x"`, nil, 0},
	} {
		media, exact := readFeatures(gjson.Parse(c.features), 10)
		if !slices.Equal(media, c.media) || exact != c.exact {
			t.Errorf("%s: %v, exact up to %d; want %v, %d", name, media, exact, c.media, c.exact)
		}
	}
}

func TestTensorsAreAskedForNowhere(t *testing.T) {
	for body, want := range map[string]string{
		`{"messages":[{"content":"x"}]}`:                                   `{"messages":[{"content":"x"}]}`,
		`{"messages":[{"content":[{"type":"text"}]}]}`:                     `{"messages":[{"content":[{"type":"text"}]}]}`,
		`{"messages":[{"content":[{"type":"image_url"}]}]}`:                `{"mm_payload":"none","messages":[{"content":[{"type":"image_url"}]}]}`,
		`{"messages":[{"content":[{"image_url":"u"}]}]}`:                   `{"mm_payload":"none","messages":[{"content":[{"image_url":"u"}]}]}`,
		`{"input":[{"content":[{"type":"input_text"}]}]}`:                  `{"input":[{"content":[{"type":"input_text"}]}]}`,
		`{"input":[{"content":[{"type":"input_image"}]}]}`:                 `{"mm_payload":"none","input":[{"content":[{"type":"input_image"}]}]}`,
		`{"messages":[{"content":[{"type":"video"}]}],"mm_payload":"all"}`: `{"mm_payload":"none","messages":[{"content":[{"type":"video"}]}]}`,
		`{"messages":[{"content":[{"type":"video"}]}]`:                     `{"messages":[{"content":[{"type":"video"}]}]`,
	} {
		if got := string(withoutTensors([]byte(body))); got != want {
			t.Errorf("%s: %s, want %s", body, got, want)
		}
	}
}
