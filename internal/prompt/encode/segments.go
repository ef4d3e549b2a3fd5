package encode

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"
)

// DefaultCache is the default size of the piece cache, tokens. Each takes 4 bytes: a full
// cache has 8 MiB, the tokens of 20 prompts of 100,000.
const DefaultCache = 2 << 20

// Segments encodes texts piece by piece and caches the tokens of the pieces, so that the
// system prompt and the earlier turns of a chat are encoded once for all requests.
//
// A tokenizer first splits a text at its added tokens, and encodes the parts
// between them separately. So a text may be cut at each added token, unless one of
// them strips neighbouring space or depends on its neighbours. In that case the
// whole text is one piece.
type Segments struct {
	encode Pieces
	// passes are the tokenizer's searches for added tokens, one in what the one
	// before leaves; none: texts are not cut.
	passes        []addedTokens
	before, after []uint32 // what addSpecial puts around a text
	cache         *segmentCache
}

// Pieces encodes pieces of a text, each as if it were a whole text; not ok: the
// tokenizer failed.
type Pieces func(text string, pieces []string, addSpecial bool) (tokens [][]uint32, ok bool)

// whole encodes a text in one piece.
func (e Pieces) whole(text string, addSpecial bool) (tokens []uint32, ok bool) {
	list, ok := e(text, []string{text}, addSpecial)
	if !ok {
		return nil, false
	}
	return list[0], true
}

// addedTokens are added tokens that are searched for together: the leftmost
// match wins, and of several there the longest.
type addedTokens struct {
	tokens  map[string]*addedToken
	lengths [256][]int // of the tokens by their first byte, longest first
	single  int        // the only first byte, or -1
}

// addedToken is one added token of a tokenizer.
type addedToken struct {
	id uint32
	// clean: it neither takes space beside it nor minds what stands beside it.
	clean bool
	// cuts: texts are cut here. Cutting at fewer places is as exact and keeps
	// pieces large where a tokenizer has added tokens for runs of space.
	cuts bool
}

// NewSegments returns the segments of the tokenizer in tokenizerJSON, the content of its
// tokenizer.json. encode encodes texts; cacheTokens limits the cache, 0: no cache.
func NewSegments(tokenizerJSON []byte, encode Pieces, cacheTokens int) *Segments {
	s := &Segments{encode: encode}
	s.SetCache(cacheTokens)
	s.readAddedTokens(tokenizerJSON)
	if !s.learnAround() || !s.proven() {
		s.passes = nil
	}
	return s
}

// SetCache sets the capacity of the cache in tokens, and empties it. It must not be
// called while texts are encoded.
func (s *Segments) SetCache(tokens int) {
	s.cache = nil
	if tokens > 0 {
		s.cache = newSegmentCache(tokens)
	}
}

// cuts reports whether texts are cut at all.
func (s *Segments) cuts() bool { return len(s.passes) > 0 }

// Encode returns the tokens of a text; the caller must not change them. Not ok:
// the tokenizer failed.
func (s *Segments) Encode(text string, addSpecial bool) (tokens []uint32, ok bool) {
	return s.EncodeBy(s.encode, text, addSpecial)
}

// EncodeBy is Encode with another way to encode pieces, which gives the same
// tokens.
func (s *Segments) EncodeBy(encode Pieces, text string, addSpecial bool) (tokens []uint32, ok bool) {
	if addSpecial && !s.cuts() || !utf8.ValidString(text) {
		return encode.whole(text, addSpecial)
	}
	var few [32]textPiece
	pieces, ok := s.cut(few[:0], text, 0)
	if !ok {
		return encode.whole(text, addSpecial)
	}
	if !s.find(encode, text, pieces) {
		return nil, false
	}
	if len(pieces) == 1 && pieces[0].special == nil && !addSpecial {
		return pieces[0].tokens, true
	}
	size := len(s.before) + len(s.after)
	for _, p := range pieces {
		size += max(1, len(p.tokens))
	}
	tokens = make([]uint32, 0, size)
	if addSpecial {
		tokens = append(tokens, s.before...)
	}
	for _, p := range pieces {
		if p.special != nil {
			tokens = append(tokens, p.special.id)
		} else {
			tokens = append(tokens, p.tokens...)
		}
	}
	if addSpecial {
		tokens = append(tokens, s.after...)
	}
	return tokens, true
}

// find fills in the tokens of the pieces of a text: those remembered, and the others
// encoded together.
func (s *Segments) find(encode Pieces, text string, pieces []textPiece) (ok bool) {
	var missing []string
	for i := range pieces {
		p := &pieces[i]
		if p.special != nil {
			continue
		}
		if s.cache != nil {
			p.tokens, _ = s.cache.get(s.cache.key(p.text))
		}
		if p.tokens == nil {
			missing = append(missing, p.text)
		}
	}
	if len(missing) == 0 {
		return true
	}
	found, ok := encode(text, missing, false)
	if !ok {
		return false
	}
	for i := range pieces {
		p := &pieces[i]
		if p.special != nil || p.tokens != nil {
			continue
		}
		p.tokens, found = found[0], found[1:]
		if s.cache != nil {
			s.cache.put(s.cache.key(p.text), p.tokens)
		}
	}
	return true
}

// textPiece is a piece of a text: an added token or what lies between two.
type textPiece struct {
	text    string
	special *addedToken
	tokens  []uint32 // nil: of an added token, or not known yet
}

// cut appends the pieces of a text, from the given pass on. Not ok: the text
// holds an added token that cannot be cut out.
func (s *Segments) cut(pieces []textPiece, text string, pass int) (out []textPiece, ok bool) {
	if text == "" {
		return pieces, true
	}
	if pass == len(s.passes) {
		return append(pieces, textPiece{text: text}), true
	}
	done := 0
	for at := 0; ; {
		start, end, token := s.passes[pass].next(text, at)
		if token == nil {
			break
		}
		if !token.clean {
			return pieces, false
		}
		at = end
		if !token.cuts {
			continue
		}
		if pieces, ok = s.cut(pieces, text[done:start], pass+1); !ok {
			return pieces, false
		}
		pieces = append(pieces, textPiece{special: token})
		done = end
	}
	return s.cut(pieces, text[done:], pass+1)
}

// next returns the first added token in text from at on, nil if there is none.
func (a *addedTokens) next(text string, at int) (start, end int, token *addedToken) {
	for i := at; i < len(text); i++ {
		if a.single >= 0 {
			skip := strings.IndexByte(text[i:], byte(a.single))
			if skip < 0 {
				break
			}
			i += skip
		}
		for _, n := range a.lengths[text[i]] {
			if i+n > len(text) {
				continue
			}
			if token, ok := a.tokens[text[i:i+n]]; ok {
				return i, i + n, token
			}
		}
	}
	return 0, 0, nil
}

func (a *addedTokens) add(content string, token *addedToken) {
	if a.tokens == nil {
		a.tokens, a.single = map[string]*addedToken{}, int(content[0])
	}
	if int(content[0]) != a.single {
		a.single = -1
	}
	a.tokens[content] = token
	lengths := &a.lengths[content[0]]
	if !slices.Contains(*lengths, len(content)) {
		*lengths = append(*lengths, len(content))
		slices.SortFunc(*lengths, func(x, y int) int { return y - x })
	}
}

// readAddedTokens fills passes from the tokenizer's file. The first pass looks for
// the tokens that are not normalized; the second, for those that are, comes
// after the normalizer, so it can be foreseen only where there is none.
func (s *Segments) readAddedTokens(tokenizerJSON []byte) {
	var passes [2]addedTokens
	list := gjson.GetBytes(tokenizerJSON, "added_tokens").Array()
	normalizer := gjson.GetBytes(tokenizerJSON, "normalizer")
	empty := normalizer.Get("type").Str == "Sequence" && len(normalizer.Get("normalizers").Array()) == 0
	second := (normalizer.Type == gjson.Null || empty) && slices.ContainsFunc(list,
		func(t gjson.Result) bool { return t.Get("normalized").Bool() })
	for _, t := range list {
		content := strings.Clone(t.Get("content").Str)
		pass := 0
		if t.Get("normalized").Bool() {
			pass = 1
		}
		if content == "" || pass == 1 && !second {
			continue
		}
		token := &addedToken{
			clean: !t.Get("lstrip").Bool() && !t.Get("rstrip").Bool() && !t.Get("single_word").Bool(),
			// The second pass must not look into tokens of the first.
			cuts: second && pass == 0 || strings.ContainsFunc(content, unicode.IsLetter),
		}
		if token.clean {
			ids, ok := s.encode.whole(content, false)
			token.clean = ok && len(ids) == 1
			if token.clean {
				token.id = ids[0]
			}
		}
		passes[pass].add(content, token)
	}
	if passes[0].tokens != nil || second {
		s.passes = passes[:1]
	}
	if second {
		s.passes = passes[:2]
	}
}

// learnAround finds what addSpecial puts around a text; not ok: it does
// something else.
func (s *Segments) learnAround() (ok bool) {
	bare, ok1 := s.encode.whole("a", false)
	around, ok2 := s.encode.whole("a", true)
	if !ok1 || !ok2 || len(bare) == 0 {
		return false
	}
	for i := 0; i+len(bare) <= len(around); i++ {
		if slices.Equal(around[i:i+len(bare)], bare) {
			s.before, s.after = slices.Clone(around[:i]), slices.Clone(around[i+len(bare):])
			return true
		}
	}
	return false
}

// borders are texts that tokenizers treat in special ways at the border of a
// piece: space, line ends, digits, contractions, marks that combine, joined
// emoji, scripts without spaces, and nothing.
var borders = []string{"", " ", "a", " a", "a ", "\n", "\n\n b", " \t ", "12345", "'s", "é", "e\u0301", "\u0301", "日本語", "👩‍👩‍👧", "▁", "<",
	"Ω≈ç ", "word word"}

// proven compares the tokens of cut texts with those of whole ones.
func (s *Segments) proven() bool {
	random := rand.New(rand.NewPCG(1, 1)) // the same texts at every start
	var names []string
	for _, pass := range s.passes {
		for content, token := range pass.tokens {
			if token.clean {
				names = append(names, content)
			}
		}
	}
	slices.Sort(names)
	for i := range 200 {
		var text strings.Builder
		for range 1 + i%6 {
			text.WriteString(borders[random.IntN(len(borders))])
			if len(names) > 0 {
				text.WriteString(names[random.IntN(len(names))])
			}
			text.WriteString(borders[random.IntN(len(borders))])
		}
		if !s.agrees(text.String(), false) || !s.agrees(text.String(), true) {
			return false
		}
	}
	return true
}

// agrees reports whether a text has the same tokens cut and whole.
func (s *Segments) agrees(text string, addSpecial bool) bool {
	whole, ok1 := s.encode.whole(text, addSpecial)
	cut, ok2 := s.Encode(text, addSpecial)
	return ok1 == ok2 && slices.Equal(whole, cut)
}

// segmentCache remembers the tokens of pieces of text, those used last. It is
// split into shards by key, so that many goroutines can use it at once.
type segmentCache struct {
	seed   uint64 // random: clients cannot construct colliding keys
	shards [segmentShards]segmentShard
}

const (
	segmentShards = 8
	// segmentCost is what an entry costs beside its tokens, in tokens.
	segmentCost = 32
)

// segmentShard is one part of the cache.
type segmentShard struct {
	mu      sync.Mutex // guards all below
	entries map[xxh3.Uint128]*segmentEntry
	oldest  segmentEntry // sentinel of a ring: next is the entry unused longest
	used    int          // tokens held, entries' costs included
	limit   int
}

// segmentEntry is one remembered piece in the ring of its shard.
type segmentEntry struct {
	key            xxh3.Uint128
	tokens         []uint32
	previous, next *segmentEntry
}

func newSegmentCache(tokens int) *segmentCache {
	c := &segmentCache{seed: rand.Uint64()}
	for i := range c.shards {
		shard := &c.shards[i]
		shard.entries = map[xxh3.Uint128]*segmentEntry{}
		shard.oldest.next, shard.oldest.previous = &shard.oldest, &shard.oldest
		shard.limit = tokens / segmentShards
	}
	return c
}

func (c *segmentCache) key(text string) xxh3.Uint128 { return xxh3.HashString128Seed(text, c.seed) }

func (c *segmentCache) shard(key xxh3.Uint128) *segmentShard {
	return &c.shards[key.Lo%segmentShards]
}

func (c *segmentCache) get(key xxh3.Uint128) ([]uint32, bool) {
	shard := c.shard(key)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	entry, ok := shard.entries[key]
	if !ok {
		return nil, false
	}
	shard.unlink(entry)
	shard.link(entry)
	return entry.tokens, true
}

// put remembers a piece and forgets those unused longest where it is too much;
// a piece larger than a shard is not remembered.
func (c *segmentCache) put(key xxh3.Uint128, tokens []uint32) {
	shard := c.shard(key)
	cost := len(tokens) + segmentCost
	if cost > shard.limit {
		return
	}
	shard.mu.Lock()
	defer shard.mu.Unlock()
	if _, ok := shard.entries[key]; ok {
		return // another goroutine was quicker
	}
	entry := &segmentEntry{key: key, tokens: slices.Clip(tokens)}
	shard.entries[key] = entry
	shard.link(entry)
	for shard.used += cost; shard.used > shard.limit; {
		last := shard.oldest.next
		shard.unlink(last)
		delete(shard.entries, last.key)
		shard.used -= len(last.tokens) + segmentCost
	}
}

// link puts an entry at the end of the ring as the one just used.
func (s *segmentShard) link(entry *segmentEntry) {
	entry.previous, entry.next = s.oldest.previous, &s.oldest
	entry.previous.next, entry.next.previous = entry, entry
}

func (s *segmentShard) unlink(entry *segmentEntry) {
	entry.previous.next, entry.next.previous = entry.next, entry.previous
}
