package page

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// Paths of the OpenAI port that the page sends requests to.
const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

const (
	// whereLimit bounds the body of a dry run, bytes, and answerLimit the answer to it
	// that is kept.
	whereLimit, answerLimit = 4 << 20, 1 << 20
	// maxPromptText bounds the shown part of a prompt, characters.
	maxPromptText = 200
)

// inside is a request to the OpenAI port that needs no key.
func inside(c *gin.Context, path string, body io.Reader, length int64) *http.Request {
	return onward(keys.Inside(c.Request.Context()), c, path, body, length)
}

// onward is a request to the OpenAI port.
func onward(ctx context.Context, c *gin.Context, path string, body io.Reader, length int64) *http.Request {
	request := c.Request.Clone(ctx)
	request.URL.Path, request.URL.RawPath, request.URL.RawQuery, request.RequestURI = path, "", "", path
	request.Header = http.Header{"Content-Type": {"application/json"}, web.HeaderRequest: {newID()}}
	request.Body, request.ContentLength, request.TransferEncoding = io.NopCloser(body), length, nil
	return request
}

// newID names a request of the page.
func newID() string {
	var random [12]byte
	rand.Read(random[:])
	return "page-" + hex.EncodeToString(random[:])
}

// try sends a chat and streams the answer back. Where only the OpenAI port requires a key,
// the chat needs one of that port, whose limits apply.
func (p *Page) try(c *gin.Context) {
	request := inside(c, chatPath, c.Request.Body, c.Request.ContentLength)
	if p.tryAsks() {
		request = onward(c.Request.Context(), c, chatPath, c.Request.Body, c.Request.ContentLength)
		web.CopyKeys(request.Header, c.Request.Header)
	}
	p.deps.OpenAI.ServeHTTP(c.Writer, request)
}

// tryAsks reports whether a chat needs a key of the OpenAI port.
func (p *Page) tryAsks() bool { return p.settings.APIKeyed && !p.settings.Keys.Asked() }

// where reports where a request would go, without sending it.
func (p *Page) where(c *gin.Context) {
	raw, err := web.ReadBody(c.Writer, c.Request, whereLimit)
	var unread *web.BodyError
	if errors.As(err, &unread) {
		fail(c, unread.Status, unread.Message)
		return
	}
	path, asked, problem := dryRun(raw)
	if problem != "" {
		fail(c, http.StatusBadRequest, problem)
		return
	}
	p.deps.Models.Decisions(0) // this one is explained
	request := inside(c, path, bytes.NewReader(asked), int64(len(asked)))
	answer := &answer{header: http.Header{}, status: http.StatusOK}
	p.deps.OpenAI.ServeHTTP(answer, request)
	if answer.status != http.StatusOK {
		message := gjson.GetBytes(answer.body.Bytes(), "error.message").String()
		if message == "" {
			message = "the router answered " + http.StatusText(answer.status)
		}
		fail(c, answer.status, message)
		return
	}
	receipt, ok := p.requests.receipt(request.Header.Get(web.HeaderRequest))
	if !ok {
		fail(c, http.StatusServiceUnavailable, "the explanation has expired: try again")
		return
	}
	c.JSON(http.StatusOK, receipt)
}

// dryRun returns a request's path and body as a question where it would go.
func dryRun(raw []byte) (path string, asked []byte, problem string) {
	body, ok := jsonbody.Parse(raw)
	if !ok {
		return "", nil, "the body is not a JSON object"
	}
	switch {
	case body.Get("messages").Exists():
		path = chatPath
	case body.Get("prompt").Exists():
		path = completionPath
	default:
		return "", nil, "give messages of a chat, or a prompt"
	}
	return path, body.With("stream", "false").With("nvext", `{"annotations":["query_instance_id:"]}`).Raw, ""
}

// answer keeps the beginning of an answer.
type answer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) { a.status = status }

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) {
	a.body.Write(b[:min(len(b), max(0, answerLimit-a.body.Len()))])
	return len(b), nil
}

// Accepted implements openai.Observer: while the dashboard is viewed, it adds a
// prompt of the default model to the prompt tree.
func (p *Journal) Accepted(x *proxy.Exchange, body *jsonbody.Body) {
	if !p.viewers.watched() {
		return
	}
	if p.showText {
		p.requests.name(x.Serial, promptText(body))
	}
	q, unit := x.Request, p.models.Default().Router.Unit()
	if !x.Default || q.Text {
		return
	}
	var text func(int) string
	if p.showText && p.model != nil && len(q.Tokens) > 0 {
		text = func(blocks int) string {
			from := min(blocks*unit, len(q.Tokens))
			return firstRunes(p.model.Decode(q.Tokens[from:min(from+textTokens, len(q.Tokens))]), maxText)
		}
	}
	if local := q.Hashes(nil, unit); len(local) > 0 {
		p.prompts.add(unit, local, p.now(), text)
	}
}

// name sets the shown part of a request's prompt.
func (r *requests) name(serial uint64, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.of(serial); e != nil {
		e.Prompt = text
	}
}

// promptText returns the beginning of what a person would call the prompt: the last
// message of a chat, or the prompt of a completion. Of long ones only the beginning is
// read.
func promptText(body *jsonbody.Body) string {
	v := body.Get("prompt")
	if !v.Exists() {
		v = body.Get("text")
	}
	if views := body.Messages(); len(views) > 0 {
		v = jsonbody.FieldOf(views[len(views)-1].Fields, "content")
	}
	if v.IsArray() {
		v.ForEach(func(_, part gjson.Result) bool {
			if part.Type == gjson.String {
				v = part
				return false
			}
			if text := part.Get("text"); text.Type == gjson.String {
				v = text
				return false
			}
			return true
		})
	}
	if v.Type != gjson.String {
		return ""
	}
	return firstRunes(beginning(v.Raw), maxPromptText)
}

// beginning returns the beginning of a JSON string, long enough for maxPromptText
// characters. It is cut between two characters, or escapes.
func beginning(raw string) string {
	const most, pair = 12 * (maxPromptText + 3), len(`\ud83d\ude00`)
	if len(raw) > most {
		end := 1
		for next := end; next <= most-pair; {
			end = next
			switch {
			case raw[next] != '\\':
				_, size := utf8.DecodeRuneInString(raw[next:])
				next += size
			case raw[next+1] != 'u':
				next += 2
			case strings.HasPrefix(strings.ToLower(raw[next+2:next+3]), "d") && raw[next+6] == '\\' && raw[next+7] == 'u':
				next += pair // it may be one character
			default:
				next += 6
			}
		}
		raw = raw[:end] + `"`
	}
	var text string
	if json.Unmarshal([]byte(raw), &text) != nil {
		return ""
	}
	return text
}

// firstRunes returns at most that many characters of a text, without control characters.
func firstRunes(text string, most int) string {
	var out strings.Builder
	for _, r := range text {
		if most--; most < 0 {
			break
		}
		if r < ' ' || r == 0x7f {
			r = ' '
		}
		out.WriteRune(r)
	}
	return strings.ToValidUTF8(out.String(), "")
}
