package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// Limits bound the files of a model, which its publisher has written.
type Limits struct {
	MaxTokenizerBytes int64 `name:"max-tokenizer-bytes" group:"Model and engine" default:"268435456" placeholder:"BYTES" hidden:"" help:"Maximum size of a tokenizer.json, bytes. The prompts of a model with a larger one are tokenized by workers."`
	MaxTemplateBytes  int64 `name:"max-template-bytes" group:"Model and engine" default:"1048576" placeholder:"BYTES" hidden:"" help:"Maximum size of a chat template, bytes. The chats of a model with a larger one are rendered by workers."`
}

// DefaultLimits are the defaults of the flags.
var DefaultLimits = Limits{MaxTokenizerBytes: 256 << 20, MaxTemplateBytes: 1 << 20}

// Validate checks that the limits are positive and fit memory.
func (l Limits) Validate() error {
	switch {
	case l.MaxTokenizerBytes < 1 || l.MaxTokenizerBytes > 1<<30:
		return fmt.Errorf("--max-tokenizer-bytes %d must be 1 to %d", l.MaxTokenizerBytes, 1<<30)
	case l.MaxTemplateBytes < 1 || l.MaxTemplateBytes > 16<<20:
		return fmt.Errorf("--max-template-bytes %d must be 1 to %d", l.MaxTemplateBytes, 16<<20)
	}
	return nil
}

const (
	// maxConfig is the maximum size of the other files, bytes. Those of models with many
	// added tokens have about 1 MB, and may contain a template.
	maxConfig = 16 << 20
	// maxNesting is the maximum nesting of their JSON; real files have about 8 levels.
	maxNesting = 64
	// maxReference is the maximum size of a reference in the Hugging Face cache, bytes.
	maxReference = 256
	// maxNamedTemplates is the maximum number of templates of a model.
	maxNamedTemplates = 64
)

// ReadFile reads a regular file, or one that links lead to, of at most max bytes. Opening
// and reading it does not block.
func ReadFile(path string, max int64) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a named pipe would block
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file", path)
	case info.Size() > max:
		return nil, fmt.Errorf("%s has %d bytes; the maximum is %d", path, info.Size(), max)
	}
	// The file may grow, or report no size.
	data := bytes.NewBuffer(make([]byte, 0, info.Size()+bytes.MinRead))
	if _, err := data.ReadFrom(io.LimitReader(file, max+1)); err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, errors.Unwrap(err))
	}
	if int64(data.Len()) > max {
		return nil, fmt.Errorf("%s has more than %d bytes, which is the maximum", path, max)
	}
	return data.Bytes(), nil
}

// ReadJSON is ReadFile for JSON, whose nesting is limited, too.
func ReadJSON(path string, max int64) ([]byte, error) {
	data, err := ReadFile(path, max)
	if err != nil {
		return nil, err
	}
	switch {
	case nesting(data) > maxNesting:
		return nil, fmt.Errorf("%s is nested more than %d levels deep", path, maxNesting)
	case !json.Valid(data):
		return nil, fmt.Errorf("%s is not JSON", path)
	}
	return data, nil
}

// nesting returns how deep the lists and objects of a JSON text are nested.
func nesting(data []byte) (deepest int) {
	depth := 0
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '"':
			for i++; i < len(data) && data[i] != '"'; i++ {
				if data[i] == '\\' {
					i++
				}
			}
		case '[', '{':
			depth++
			deepest = max(deepest, depth)
		case ']', '}':
			depth--
		}
	}
	return deepest
}

// readTemplate reads a chat template; there is false if the file is missing.
func readTemplate(path string, limits Limits) (text string, there bool, err error) {
	data, err := ReadFile(path, limits.MaxTemplateBytes)
	if errors.Is(err, os.ErrNotExist) {
		return "", false, nil
	}
	return string(data), err == nil, err
}

// namedTemplates returns the paths of the templates with a name in a model's folder.
func namedTemplates(dir string) ([]string, error) {
	paths, _ := filepath.Glob(filepath.Join(dir, "chat_templates", "*.jinja"))
	if len(paths) > maxNamedTemplates {
		return nil, fmt.Errorf("%s has %d templates; the maximum is %d", filepath.Join(dir, "chat_templates"), len(paths), maxNamedTemplates)
	}
	return paths, nil
}
