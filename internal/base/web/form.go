package web

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
	"strings"
)

// IsJSON reports whether servers read a body of that type and size as JSON: also one without a
// type.
func IsJSON(contentType string, size int) bool {
	kind, _, _ := strings.Cut(contentType, ";")
	kind = strings.ToLower(strings.TrimSpace(kind))
	return kind == "" && size > 0 || kind == "application/json" || strings.HasSuffix(kind, "+json")
}

// Limits of FormField.
const (
	maxFormParts = 64
	maxFormField = 1024 // bytes
)

// FormField returns a field of a multipart form; empty if it is longer than 1 KiB or
// not among the first 64 parts.
func FormField(contentType string, body []byte, name string) string {
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "multipart/form-data" {
		return ""
	}
	form := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	for range maxFormParts {
		part, err := form.NextRawPart()
		if err != nil {
			return ""
		}
		if part.FormName() != name || part.FileName() != "" {
			continue
		}
		value, err := io.ReadAll(io.LimitReader(part, maxFormField+1))
		if err != nil || len(value) > maxFormField {
			return ""
		}
		return string(value)
	}
	return ""
}
