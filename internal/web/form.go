package web

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
)

// Bounds of what FormField reads.
const (
	maxFormParts = 64
	maxFormField = 1024 // bytes
)

// FormField returns a field of a multipart form, as far as it is short and among the
// first parts; else nothing.
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
