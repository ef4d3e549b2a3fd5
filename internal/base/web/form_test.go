package web

import (
	"bytes"
	"mime/multipart"
	"strings"
	"testing"
)

// form returns a multipart form and its type; pairs are names and values.
func form(t testing.TB, pairs ...string) (contentType string, body []byte) {
	t.Helper()
	var out bytes.Buffer
	w := multipart.NewWriter(&out)
	if file, err := w.CreateFormFile("file", "model"); err != nil {
		t.Fatal(err)
	} else if _, err := file.Write(bytes.Repeat([]byte("sound"), 1000)); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(pairs); i += 2 {
		if err := w.WriteField(pairs[i], pairs[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return w.FormDataContentType(), out.Bytes()
}

func TestFormFieldReadsAShortFieldOfAForm(t *testing.T) {
	many := []string{}
	for range maxFormParts {
		many = append(many, "other", "x")
	}
	for _, test := range []struct {
		name  string
		pairs []string
		kind  string // empty: the form's
		want  string
	}{
		{"behind a file", []string{"language", "en", "model", "whisper"}, "", "whisper"},
		{"none", []string{"language", "en"}, "", ""},
		{"too long", []string{"model", strings.Repeat("x", maxFormField+1)}, "", ""},
		{"as long as may be", []string{"model", strings.Repeat("x", maxFormField)}, "", strings.Repeat("x", maxFormField)},
		{"behind too many others", append(many, "model", "whisper"), "", ""},
		{"no form", []string{"model", "whisper"}, "text/plain", ""},
		{"no boundary", []string{"model", "whisper"}, "multipart/form-data", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			kind, body := form(t, test.pairs...)
			if test.kind != "" {
				kind = test.kind
			}
			if got := FormField(kind, body, "model"); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

func FuzzFormField(f *testing.F) {
	kind, body := form(f, "model", "whisper")
	f.Add(kind, body)
	f.Add("multipart/form-data; boundary=x", []byte("--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n"))
	f.Fuzz(func(t *testing.T, kind string, body []byte) {
		if got := FormField(kind, body, "model"); len(got) > maxFormField {
			t.Errorf("%d bytes", len(got))
		}
	})
}
