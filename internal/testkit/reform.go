package testkit

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"unicode/utf16"

	"github.com/tidwall/gjson"
)

// Reformer writes JSON and events in another form that means the same: with other spaces, orders,
// escapes, forms of numbers, line ends and comments. One goroutine uses it.
type Reformer struct{ random *rand.Rand }

// NewReformer returns a reformer whose forms follow from the seed.
func NewReformer(seed uint64) *Reformer {
	return &Reformer{rand.New(rand.NewPCG(seed, 1))}
}

// oneOf returns one of these texts.
func (r *Reformer) oneOf(texts ...string) string { return texts[r.random.IntN(len(texts))] }

// space returns the space between two parts of a JSON text.
func (r *Reformer) space() string { return r.oneOf("", "", " ", "\n", "  \t") }

// JSON returns a text equal to a JSON text.
func (r *Reformer) JSON(text string) string { return r.value(gjson.Parse(text)) }

func (r *Reformer) value(v gjson.Result) string {
	var parts []string
	switch {
	case v.IsObject():
		v.ForEach(func(key, value gjson.Result) bool {
			parts = append(parts, r.text(key.Str)+r.space()+":"+r.space()+r.value(value))
			return true
		})
		r.random.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		return "{" + r.list(parts) + "}"
	case v.IsArray():
		v.ForEach(func(_, value gjson.Result) bool {
			parts = append(parts, r.value(value))
			return true
		})
		return "[" + r.list(parts) + "]"
	case v.Type == gjson.String:
		return r.text(v.Str)
	case v.Type == gjson.Number && v.Raw != "0" && !strings.ContainsAny(v.Raw, ".eE"):
		return r.oneOf(v.Raw, v.Raw, v.Raw+".0", v.Raw+"e0", v.Raw+"0E-1")
	}
	return v.Raw
}

// list joins the parts of an object or an array.
func (r *Reformer) list(parts []string) string {
	var out strings.Builder
	for i, part := range parts {
		if i > 0 {
			out.WriteString(",")
		}
		out.WriteString(r.space() + part + r.space())
	}
	return out.String()
}

// text returns a JSON string.
func (r *Reformer) text(s string) string {
	var out strings.Builder
	out.WriteByte('"')
	for _, c := range s {
		switch {
		case c < ' ' || c == '"' || c == '\\' || r.random.IntN(6) == 0:
			for _, unit := range utf16.Encode([]rune{c}) {
				fmt.Fprintf(&out, r.oneOf(`\u%04x`, `\u%04X`), unit)
			}
		default:
			out.WriteRune(c)
		}
	}
	out.WriteByte('"')
	return out.String()
}

// Event returns an event that means the same as one of a line of data.
func (r *Reformer) Event(event string) string {
	end := r.oneOf("\n", "\r\n", "\r")
	var out strings.Builder
	for line := range strings.Lines(strings.TrimRight(event, "\n")) {
		line = strings.TrimRight(line, "\n")
		if r.random.IntN(8) == 0 {
			out.WriteString(": comment" + end)
		}
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok {
			out.WriteString(strings.Replace(line, ": ", r.oneOf(":", ": "), 1) + end)
			continue
		}
		if gjson.Valid(data) {
			data = r.JSON(data)
		} else {
			data = r.oneOf("", " ") + data + r.oneOf("", " ")
		}
		for part := range strings.SplitSeq(data, "\n") {
			out.WriteString("data:" + r.oneOf("", " ") + part + end)
		}
	}
	return out.String() + end
}

// Reformed returns a handler that answers with what handler does in another form, cut anywhere.
func Reformed(handler http.Handler, seed uint64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reform := &reformedWriter{ResponseWriter: w, reformer: NewReformer(seed + 1)}
		if reform.reformer.random.IntN(2) == 0 {
			reform.begin = "\xef\xbb\xbf"
		}
		handler.ServeHTTP(reform, r)
		w.Write(reform.rest)
	})
}

// reformedWriter writes events in another form.
type reformedWriter struct {
	http.ResponseWriter
	reformer *Reformer
	begin    string // goes before the first event
	rest     []byte
}

// Flush implements http.Flusher.
func (w *reformedWriter) Flush() {}

// Write writes the events that end in a part.
func (w *reformedWriter) Write(part []byte) (int, error) {
	w.rest = append(w.rest, part...)
	for {
		event, rest, ok := bytes.Cut(w.rest, []byte("\n\n"))
		if !ok {
			return len(part), nil
		}
		text := w.begin + w.reformer.Event(string(event)+"\n\n")
		for w.rest, w.begin = rest, ""; text != ""; {
			n := min(len(text), 1+w.reformer.random.IntN(80))
			if _, err := w.ResponseWriter.Write([]byte(text[:n])); err != nil {
				return 0, err
			}
			w.ResponseWriter.(http.Flusher).Flush()
			text = text[n:]
		}
	}
}

// Events returns the data of the events of a stream, as a client reads them by the standard, each
// after the event's name and a space if it has one.
func Events(stream string) (events []string) {
	stream = strings.TrimPrefix(strings.ReplaceAll(strings.ReplaceAll(stream, "\r\n", "\n"), "\r", "\n"), "\ufeff")
	for event := range strings.SplitSeq(stream, "\n\n") {
		var name string
		var data []string
		for line := range strings.SplitSeq(event, "\n") {
			field, value, _ := strings.Cut(line, ":")
			switch value = strings.TrimPrefix(value, " "); field {
			case "event":
				name = value + " "
			case "data":
				data = append(data, value)
			}
		}
		if len(data) > 0 {
			events = append(events, name+strings.Join(data, "\n"))
		}
	}
	return events
}
