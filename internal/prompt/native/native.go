// Package native is the way to the library in native/: tokenizers and chat templates in Rust.
//
// scripts/build-native.sh builds the library and writes a file in package link, which links it.
// Without that file the module builds with Go alone, and workers tokenize the prompts.
package native

import "errors"

// ErrMissing means that the program was built without the library.
var ErrMissing = errors.New("this program was built without the native library: run scripts/build-native.sh, which needs Rust and a C compiler, and build it again")

// linked is the library; nil: the program was built without it.
var linked Library

// Link sets the library. Package link calls it before the program starts; a program without that one may before it
// opens a model.
func Link(l Library) { linked = l }

// Linked reports whether the program has the library.
func Linked() bool { return linked != nil }

// Open returns the library. The error is ErrMissing.
func Open() (Library, error) {
	if linked == nil {
		return nil, ErrMissing
	}
	return linked, nil
}

// Library is the library in native/. It is safe for concurrent use.
type Library interface {
	// NewFast returns crate fastokens' encoder for a tokenizer.json, or the reason why it has none.
	NewFast(tokenizerJSON []byte) (fast Fast, why string)
	// NewExact returns crate tokenizers' tokenizer for a tokenizer.json.
	NewExact(tokenizerJSON []byte) (Exact, error)
	// NewTemplate compiles a Jinja chat template with the settings that transformers gives to jinja2.
	NewTemplate(source string) (Template, error)
	// CheckRegex returns an error if a regular expression may take a time without limit for a text,
	// and whether the time may grow with the square of the text's length.
	CheckRegex(expression string) (square bool, err error)
	// ReadInPages allocates large tables in pages of their own while a tokenizer is read, so that
	// freed tables leave no holes. The caller calls done afterwards: it returns the free memory to
	// the system and lets texts and tokens reuse theirs.
	ReadInPages() (done func())
	// BoundArenas limits the arenas of glibc's malloc to the number of processors. The default is
	// eight times as many, and arenas do not return their memory.
	BoundArenas()
	// ReleaseStartup removes the program's code and constants from resident memory. Pages that are
	// needed again are read from the system's file cache.
	ReleaseStartup()
}

// Result is what became of a call that has limits of time and memory.
type Result int32

// The results.
const (
	Failed  Result = iota
	Done           // as asked
	Limited        // it reached a limit
)

// Fast encodes texts by crate fastokens. It is safe for concurrent use, but for Close.
type Fast interface {
	// Encode sets the tokens of pieces of a text, each encoded as if it were a whole text; nil: it
	// could not encode that one. It reports whether it encoded all.
	Encode(tokens [][]uint32, text string, pieces []string, addSpecial bool) (all bool)
	Close()
}

// Exact is a tokenizer of crate tokenizers. It is safe for concurrent use, but for Close.
type Exact interface {
	// Encode returns the tokens of a text, which are not nil if it is Done.
	Encode(text string, addSpecial bool) ([]uint32, Result)
	// Decode returns the text of at most 2^32-1 tokens, special ones too.
	Decode(tokens []uint32) (string, error)
	Close()
}

// Template is a compiled chat template. It is safe for concurrent use, but for Close.
type Template interface {
	// WantsParts reports whether the template loops over a message's content.
	WantsParts() bool
	// Render returns the text for a context, the JSON object of the template's variables, or the
	// reason why it is not Done, in the library's memory: the caller calls Free.
	Render(context []byte) (text []byte, result Result)
	// Free releases what Render returned, also after Close.
	Free(text []byte)
	Close()
}
