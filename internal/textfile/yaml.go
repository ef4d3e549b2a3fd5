package textfile

import (
	"errors"
	"fmt"
	"strings"
)

// Limits of YAML. The decoder's time grows with their square, or faster.
const (
	maxNesting = 16  // nested lists and mappings
	maxBlank   = 100 // lines in a row that start nothing
)

// BoundYAML refuses text that can take the decoder longer than a list of small mappings:
// deep nesting, anchors, aliases, and other syntax that such a list does not need. It does
// not parse all of YAML: ambiguous text counts as nesting. most is the maximum number of
// entries of all lists and mappings. Errors name the line and never show its text.
func BoundYAML(data []byte, most int) error {
	b := yamlBounds{left: most}
	text := strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(string(data))
	number := 0
	for line := range strings.SplitSeq(text, "\n") {
		number++
		err := b.line(line)
		if err == nil && b.left < 0 {
			err = fmt.Errorf("more than %d entries of lists and mappings", most)
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
	}
	return nil
}

// yamlBounds is the state of BoundYAML after the lines so far.
type yamlBounds struct {
	columns []int // of the open blocks
	flow    int   // open brackets
	blank   int   // lines in a row that start nothing
	left    int   // entries left of the maximum
}

var errNesting = fmt.Errorf("lists and mappings are nested more than %d deep", maxNesting)

// line checks the next line.
func (b *yamlBounds) line(line string) error {
	at := len(line) - len(strings.TrimLeft(line, " \t"))
	starts := b.flow > 0 || line[at:] == "-" || strings.HasPrefix(line[at:], "- ") || strings.Contains(line, ": ") || strings.HasSuffix(strings.TrimRight(line, " \t"), ":")
	if b.blank++; starts {
		b.blank = 0
	}
	if b.blank > maxBlank {
		return fmt.Errorf("more than %d consecutive lines that are empty, comments or continued text", maxBlank)
	}
	for b.flow == 0 && at < len(line) && line[at] != '#' { // each block that opens
		for len(b.columns) > 0 && b.columns[len(b.columns)-1] >= at {
			b.columns = b.columns[:len(b.columns)-1]
		}
		b.columns = append(b.columns, at)
		if len(b.columns) > maxNesting {
			return errNesting
		}
		if line[at] != '-' || at+1 < len(line) && line[at+1] != ' ' && line[at+1] != '\t' {
			break
		}
		b.left--
		at++
		at += len(line[at:]) - len(strings.TrimLeft(line[at:], " \t"))
	}
	return b.rest(line[at:])
}

// rest checks a line after the start of its blocks.
func (b *yamlBounds) rest(text string) error {
	fresh, space, values := true, true, 0 // a value may start here; a comment may
	for i := 0; i < len(text); i++ {
		c := text[i]
		before := space
		space = c == ' ' || c == '\t'
		switch {
		case space:
			continue
		case c == '#' && before:
			return b.passed(text[i:])
		case c == '[' || c == '{':
			if !fresh && b.flow == 0 { // within a plain scalar, as in http://[::1]:8000
				continue
			}
			if b.flow++; b.flow+len(b.columns) > maxNesting {
				return errNesting
			}
			fresh, values = true, 0
			continue
		case (c == ']' || c == '}') && b.flow > 0:
			b.flow--
			fresh = true // what comes next is read as if a value may start
			continue
		case c == ',' && b.flow > 0:
			b.left--
			fresh, values = true, 0
			continue
		case c == ':' && (i+1 == len(text) || text[i+1] == ' ' || text[i+1] == '\t'):
			if values++; values > 1 {
				return errors.New("two values for one field")
			}
			b.left--
			fresh = true
			continue
		case fresh && (c == '"' || c == '\''):
			end := quoteEnd(text, i)
			if end < 0 {
				return errors.New("a quote does not end on its line")
			}
			if err := b.passed(text[i : end+1]); err != nil {
				return err
			}
			i = end // what comes next is read as if a value may start
			continue
		case fresh && c == '-' && (i+1 == len(text) || text[i+1] == ' ' || text[i+1] == '\t'):
			return errors.New("a list with dashes begins within a line or brackets")
		case fresh && strings.IndexByte("&*!|>?%@`", c) >= 0:
			return fmt.Errorf("%q starts unsupported YAML; quote a text that starts with it", string(c))
		}
		fresh = false
	}
	return nil
}

// passed counts brackets in text that neither starts nor ends a list.
func (b *yamlBounds) passed(text string) error {
	open, most := 0, 0
	for _, c := range []byte(text) {
		switch c {
		case '[', '{':
			open++
		case ']', '}':
			open--
		}
		most = max(most, open)
	}
	if most > maxNesting {
		return errNesting
	}
	return nil
}

// quoteEnd returns the end of the quoted text that starts there; -1: it is not on this
// line.
func quoteEnd(text string, start int) int {
	for i := start + 1; i < len(text); i++ {
		switch {
		case text[i] == '\\' && text[start] == '"', strings.HasPrefix(text[i:], "''") && text[start] == '\'':
			i++
		case text[i] == text[start]:
			return i
		}
	}
	return -1
}
