package encode

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/prompt/native"
)

// Bounds of a tokenizer, several times what known models have. Within them the time and
// the memory for a text grow with its length.
const (
	maxSteps      = 64       // normalizers, pre-tokenizers and decoders together
	maxSection    = 64 << 10 // bytes of the JSON of such a section
	maxCharsmap   = 8 << 20  // bytes of the same with the table of a Precompiled normalizer
	maxAdded      = 1 << 15  // added tokens
	maxTokenChars = 4096     // characters of a token
	maxPieceChars = 512      // the same for Unigram, which tries tokens of each length at each position
	maxWordChars  = 256      // longest word that WordPiece splits, in a time that grows with its cube
)

// SquareText is the maximum length of a text for a tokenizer that may take a time in
// proportion to the square of it, bytes: about a second.
const SquareText = 32 << 10

// Check returns an error if the tokenizer in tokenizerJSON could take unlimited time or
// memory for a text, and whether the time may grow with the square of its length.
func Check(library native.Library, tokenizerJSON []byte) (square bool, err error) {
	c := checker{library: library}
	for _, name := range []string{"normalizer", "pre_tokenizer", "post_processor", "decoder"} {
		section := gjson.GetBytes(tokenizerJSON, name)
		most := maxSection
		if name == "normalizer" {
			most = maxCharsmap
		}
		if len(section.Raw) > most {
			return false, fmt.Errorf("%s has %d bytes; the maximum is %d", name, len(section.Raw), most)
		}
		if err := c.section(section); err != nil {
			return false, fmt.Errorf("%s: %w", name, err)
		}
	}
	if c.steps > maxSteps {
		return false, fmt.Errorf("it has %d normalizers, pre-tokenizers and decoders; the maximum is %d", c.steps, maxSteps)
	}
	return c.square, checkModel(tokenizerJSON)
}

// checker checks the sections of a tokenizer.
type checker struct {
	library native.Library
	steps   int
	square  bool // some expression may take a time that grows with the square
}

// section checks the regular expressions of a section, and counts its steps.
func (c *checker) section(v gjson.Result) (err error) {
	if v.Get("type").Type == gjson.String {
		c.steps++
	}
	if !v.IsObject() && !v.IsArray() {
		return nil
	}
	v.ForEach(func(key, value gjson.Result) bool {
		if key.Str == "Regex" && value.Type == gjson.String {
			err = c.expression(value.Str)
		} else {
			err = c.section(value)
		}
		return err == nil
	})
	return err
}

func (c *checker) expression(text string) error {
	square, err := c.library.CheckRegex(text)
	if err != nil {
		return fmt.Errorf("the regular expression %.60q may take unlimited time: %w", text, err)
	}
	c.square = c.square || square
	return nil
}

// checkModel checks the vocabulary.
func checkModel(tokenizerJSON []byte) error {
	model := gjson.GetBytes(tokenizerJSON, "model")
	kind := model.Get("type").Str
	if n := model.Get("max_input_chars_per_word").Int(); n > maxWordChars || n < 0 {
		return fmt.Errorf("max_input_chars_per_word is %d; the maximum is %d", n, maxWordChars)
	}
	most := maxTokenChars
	if kind == "Unigram" {
		most = maxPieceChars
	}
	longest := 0
	vocabulary := model.Get("vocab")
	isMap := vocabulary.IsObject()
	vocabulary.ForEach(func(key, value gjson.Result) bool {
		token := key.Str
		if !isMap {
			token = value.Get("0").Str // Unigram: a list of [name, score]
		}
		longest = max(longest, utf8.RuneCountInString(token))
		return longest <= most
	})
	added := 0
	gjson.GetBytes(tokenizerJSON, "added_tokens").ForEach(func(_, token gjson.Result) bool {
		added++
		longest = max(longest, utf8.RuneCountInString(token.Get("content").Str))
		return added <= maxAdded
	})
	switch {
	case longest > most:
		return fmt.Errorf("a token has more than %d characters, which is the maximum", most)
	case added > maxAdded:
		return fmt.Errorf("it has more than %d added tokens, which is the maximum", maxAdded)
	case !model.IsObject():
		return errors.New("it has no model")
	}
	return nil
}
