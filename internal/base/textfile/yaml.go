package textfile

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/goccy/go-yaml/scanner"
	"github.com/goccy/go-yaml/token"
)

// Limits of YAML. Time and memory of the parser grow with the square of each.
const (
	maxNesting   = 100 // nested lists and mappings
	maxDocuments = 100
	maxBlank     = 100 // empty lines in a row, in a file with block scalars
)

// BoundYAML refuses text that takes the parser much longer than its size: deep nesting, many
// documents, long blank parts of block scalars, more than most entries of lists and mappings,
// and aliases, which the decoder may write out, so that few lines become any number. Errors name
// the line and never show its text.
func BoundYAML(data []byte, most int) error {
	text := strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(string(data))
	if err := boundBlank(text); err != nil {
		return err
	}
	var s scanner.Scanner
	s.Init(text)
	open, row, dashes, documents := 0, 0, 0, 0 // open brackets; the line of the last dash, and its dashes
	for {
		tokens, err := s.Scan()
		if errors.Is(err, io.EOF) {
			return nil
		}
		for _, t := range tokens {
			switch t.Type {
			case token.SequenceStartType, token.MappingStartType:
				open++
			case token.SequenceEndType, token.MappingEndType:
				open = max(0, open-1)
			case token.SequenceEntryType, token.MappingKeyType:
				if most--; t.Position.Line != row {
					row, dashes = t.Position.Line, 0
				}
				dashes++
			case token.CollectEntryType, token.MappingValueType, token.AnchorType, token.TagType, token.DirectiveType:
				most--
			case token.DocumentHeaderType:
				documents++
			}
			switch {
			case t.Type == token.AliasType:
				return fmt.Errorf("line %d: aliases are not supported", t.Position.Line)
			case max(open, dashes) > maxNesting:
				return fmt.Errorf("line %d: lists and mappings are nested more than %d deep", t.Position.Line, maxNesting)
			case documents > maxDocuments:
				return fmt.Errorf("line %d: more than %d documents", t.Position.Line, maxDocuments)
			case most < 0:
				return fmt.Errorf("line %d: too many entries of lists and mappings", t.Position.Line)
			}
		}
	}
}

// boundBlank refuses more than maxBlank empty lines in a row, if a line seems to begin a block
// scalar.
func boundBlank(text string) error {
	blank, number, blocks := 0, 0, false
	for line := range strings.SplitSeq(text, "\n") {
		number++
		if blank++; strings.TrimSpace(line) != "" {
			blank = 0
		}
		if blank > maxBlank && blocks {
			return fmt.Errorf("line %d: more than %d consecutive empty lines in a file with block scalars", number, maxBlank)
		}
		blocks = blocks || strings.ContainsAny(line, "|>")
	}
	return nil
}
