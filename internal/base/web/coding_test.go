package web

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvrouter/internal/base/quota"
)

// coded returns a text in a content coding.
func coded(t testing.TB, coding, text string) string {
	var out bytes.Buffer
	var to io.WriteCloser = gzip.NewWriter(&out)
	if coding == "deflate" {
		to = zlib.NewWriter(&out)
	}
	if _, err := io.WriteString(to, text); err != nil {
		t.Fatal(err)
	}
	to.Close()
	return out.String()
}

func TestBodiesAreDecoded(t *testing.T) {
	text := `{"a":"` + strings.Repeat("x", 100_000) + `"}`
	zipped := coded(t, "gzip", text)
	for _, test := range []struct {
		name   string
		coding []string
		body   string
		status int // 0: read
		want   string
	}{
		{"none", nil, text, 0, text},
		{"identity", []string{"identity"}, text, 0, text},
		{"gzip", []string{"gzip"}, zipped, 0, text},
		{"another case, beside identity", []string{"identity", " GZip "}, zipped, 0, text},
		{"its old name", []string{"x-gzip"}, zipped, 0, text},
		{"in two members", []string{"gzip"}, coded(t, "gzip", "{") + coded(t, "gzip", "}"), 0, "{}"},
		{"deflate", []string{"deflate"}, coded(t, "deflate", text), 0, text},
		{"an empty body", []string{"gzip"}, "", 0, ""},
		{"zstd", []string{"zstd"}, "x", 415, ""},
		{"br", []string{"br"}, "x", 415, ""},
		{"twice", []string{"gzip, gzip"}, coded(t, "gzip", zipped), 415, ""},
		{"not gzip", []string{"gzip"}, text, 400, ""},
		{"cut", []string{"gzip"}, zipped[:len(zipped)/2], 400, ""},
		{"more after it", []string{"gzip"}, zipped + "{}", 400, ""},
		{"a wrong checksum", []string{"gzip"}, zipped[:len(zipped)-8] + "12345678", 400, ""},
		{"too large", []string{"gzip"}, coded(t, "gzip", strings.Repeat("x", 1<<20+1)), 413, ""},
		{"far too large", []string{"gzip"}, coded(t, "gzip", strings.Repeat("x", 64<<20)), 413, ""},
		{"without a content, and too large", []string{"gzip"}, strings.Repeat(coded(t, "gzip", ""), 1<<20/20), 413, ""},
	} {
		b := NewBodies(1<<20, quota.New(4<<20))
		request := func() (*httptest.ResponseRecorder, *http.Request) {
			r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(test.body))
			r.ContentLength = -1
			if test.coding != nil {
				r.Header["Content-Encoding"] = test.coding
			}
			return httptest.NewRecorder(), r
		}
		check := func(how string, w *httptest.ResponseRecorder, got []byte, err error) {
			t.Helper()
			var bad *BodyError
			switch {
			case test.status == 0 && (err != nil || string(got) != test.want):
				t.Errorf("%s%s: %d bytes, %v", test.name, how, len(got), err)
			case test.status != 0 && (!errors.As(err, &bad) || bad.Status != test.status):
				t.Errorf("%s%s: %v, want %d", test.name, how, err, test.status)
			case (test.status == 415) != (w.Header().Get("Accept-Encoding") == "gzip, deflate"):
				t.Errorf("%s%s: %v", test.name, how, w.Header())
			}
		}
		w, r := request()
		got, err := b.Read(w, r, "")
		check("", w, got, err)
		if held := b.Held(); held < int64(len(got)) || held > 2<<20 || err != nil && held != 0 {
			t.Errorf("%s: %d bytes are held", test.name, held)
		}
		b.Done("", got)
		if b.Held() != 0 {
			t.Errorf("%s: %d bytes are held by nobody", test.name, b.Held())
		}
		w, r = request()
		got, err = ReadBody(w, r, 1<<20)
		check(" as a small one", w, got, err)
	}
}

// TestADecodersMemoryCounts: no decoder is made where it has no place.
func TestADecodersMemoryCounts(t *testing.T) {
	b := NewBodies(1<<20, quota.New(decoderMemory-1))
	r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(coded(t, "gzip", "{}")))
	r.Header.Set("Content-Encoding", "gzip")
	var bad *BodyError
	if _, err := b.Read(httptest.NewRecorder(), r, ""); !errors.As(err, &bad) || bad.Status != http.StatusServiceUnavailable || b.Held() != 0 {
		t.Errorf("%v, %d bytes held", err, b.Held())
	}
}

// FuzzDecoder reads what is no body in memory that is bounded.
func FuzzDecoder(f *testing.F) {
	for _, coding := range []string{"gzip", "deflate"} {
		f.Add(coding, []byte(coded(f, coding, `{"a":1}`)))
		f.Add(coding, []byte(coded(f, coding, strings.Repeat("x", 100_000))))
	}
	f.Add("gzip, deflate", []byte("x"))
	f.Fuzz(func(t *testing.T, coding string, body []byte) {
		b := NewBodies(1<<16, quota.New(1<<20))
		r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body))
		r.Header["Content-Encoding"] = []string{coding}
		got, err := b.Read(httptest.NewRecorder(), r, "")
		var bad *BodyError
		if err != nil && !errors.As(err, &bad) || len(got) > 1<<16 {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		b.Done("", got)
		if b.Held() != 0 {
			t.Fatalf("%d bytes are still held", b.Held())
		}
	})
}
