package mocker

import (
	"errors"
	"math/rand/v2"
	"strings"

	"kvrouter/internal/prompt/tokens"
)

// Vocabulary has the words of mock workers' answers.
const Vocabulary = "a the of and to in is it that was for on are with as they be at one have this from or had by hot but some what " +
	"there we can out other were all your when up use word how said an each she which do their time if will way about many then them would " +
	"write like so these her long make thing see him two has look more day could go come did my sound no most number who over know water " +
	"than call first people may down side been now find"

// word is one word's tokens and the text that each adds to an answer.
type word struct {
	tokens []uint32
	texts  []string
}

// vocabulary makes the answers of mock workers: words that follow from the
// prompt, in a model's own tokens, so that a client that sends an answer back
// as part of its next prompt finds the answer's blocks in the cache.
type vocabulary struct {
	first []word // begin an answer
	later []word // follow after a space
}

func newVocabulary(model *tokens.Model) (*vocabulary, error) {
	w := &vocabulary{}
	const before = "we"
	context := model.Encode(before, false)
	for text := range strings.FieldsSeq(Vocabulary) {
		if word, ok := takeWord(model, nil, "", text); ok {
			w.first = append(w.first, word)
		}
		if word, ok := takeWord(model, context, before, " "+text); ok {
			w.later = append(w.later, word)
		}
	}
	if len(w.first) == 0 || len(w.later) == 0 {
		return nil, errors.New("the tokenizer has no English word whose tokens decode to the same word")
	}
	return w, nil
}

// takeWord splits text, which follows before with the given tokens, into its
// tokens and what each adds. It is not ok if that depends on more than text.
func takeWord(model *tokens.Model, context []uint32, before, text string) (word word, ok bool) {
	all := model.Encode(before+text, false)
	if len(all) <= len(context) {
		return word, false
	}
	for i, t := range context {
		if all[i] != t {
			return word, false
		}
	}
	soFar := before
	for n := len(context) + 1; n <= len(all); n++ {
		decoded := model.Decode(all[:n])
		added, extends := strings.CutPrefix(decoded, soFar)
		if !extends {
			return word, false
		}
		word.texts = append(word.texts, added)
		soFar = decoded
	}
	word.tokens = all[len(context):]
	return word, soFar == before+text
}

// answer returns n tokens and their texts; the same seed gives the same.
func (w *vocabulary) answer(seed uint64, n int) (tokens []uint32, texts []string) {
	random := rand.New(rand.NewPCG(seed, seed))
	tokens, texts = make([]uint32, 0, n), make([]string, 0, n)
	words := w.first
	for len(tokens) < n {
		word := words[random.IntN(len(words))]
		k := min(len(word.tokens), n-len(tokens))
		tokens, texts = append(tokens, word.tokens[:k]...), append(texts, word.texts[:k]...)
		words = w.later
	}
	return tokens, texts
}
