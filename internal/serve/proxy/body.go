package proxy

import (
	"bytes"
	"io"
	"slices"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// edits are the body of a request to a worker: the client's, with changes that are written once,
// when the request is sent. The client's members stay where they are, except those of the same
// names as the router's: of two an engine reads the last.
type edits struct {
	client *jsonbody.Body   // nil: there is none
	whole  []byte           // takes its place; nil: it does not
	front  []jsonbody.Field // that the router adds, the last added first
	sets   []jsonbody.Field // of the client's, or behind front, the last set first
	usage  bool             // request the usage of the stream
}

// editsOf returns the body of a client's request.
func editsOf(u *Upstream) edits {
	return edits{client: u.Body, usage: u.AskUsage && needsUsage(u.Body)}
}

// add adds members in front of those added before.
func (e *edits) add(fields ...jsonbody.Field) { e.front = append(slices.Clip(fields), e.front...) }

// set gives a member of the client's another value.
func (e *edits) set(key, raw string) {
	e.sets = slices.Concat([]jsonbody.Field{{Key: key, Raw: raw}}, e.sets)
}

// extend adds the members of an object to the value that a member was set to, if it was: the tokens
// of a continued chat stay beside the source of its blocks.
func (e *edits) extend(key, object string) (extended bool) {
	at := slices.IndexFunc(e.sets, func(f jsonbody.Field) bool { return f.Key == key })
	if at < 0 {
		return false
	}
	set := jsonbody.Fields(gjson.Parse(e.sets[at].Raw))
	e.sets[at].Raw = jsonbody.View(jsonbody.Merge(gjson.Parse(object), set...))
	return true
}

// joinedBody is up to which size the body is written in one part, bytes. Only of a reader that
// net/http knows for one of memory it sends the beginning together with the headers: other ones
// cost a write and two buffers of 32 KB more, which is more than a copy of a small body.
const joinedBody = 64 << 10

// write returns the body, in one part if it is small.
func (e *edits) write() (head, rest []byte) {
	head, rest = e.bytes()
	if len(head) > 0 && len(head)+len(rest) <= joinedBody {
		head, rest = append(head, rest...), nil
	}
	return head, rest
}

// joined returns a reader of both parts of a body.
func joined(head, rest []byte) io.Reader {
	switch {
	case len(rest) == 0:
		return bytes.NewReader(head)
	case len(head) == 0:
		return bytes.NewReader(rest)
	}
	return io.MultiReader(bytes.NewReader(head), bytes.NewReader(rest))
}

// bytes returns the body in two parts, so that adding to its beginning copies nothing.
func (e *edits) bytes() (head, rest []byte) {
	switch {
	case e.whole != nil || e.client == nil:
		return nil, e.whole
	case len(e.front) == 0 && len(e.sets) == 0 && !e.usage:
		return nil, e.client.Raw
	}
	rest = e.client.Raw
	var options gjson.Result // the client's
	asked, place := "", 0    // what takes their place
	fields := slices.Clip(e.front)
	if e.usage {
		if options = e.client.Get("stream_options"); options.Exists() {
			asked, place = string(askUsage(options)), e.client.Place(options)
		} else {
			fields = append(fields, jsonbody.Field{Key: "stream_options", Raw: `{"include_usage":true}`})
		}
	}
	fields = append(fields, e.sets...)
	elsewhere := place < 0 || place+len(options.Raw) > len(rest) // the client's body was changed before
	if elsewhere || slices.ContainsFunc(fields, func(f jsonbody.Field) bool { return e.client.Get(f.Key).Exists() }) {
		rest, asked, place = e.others(fields, asked), "", 0
	}
	inside := bytes.IndexByte(rest, '{') + 1
	room := jsonbody.ObjectSize(fields) + len(asked) + place
	if len(rest) <= joinedBody {
		room += len(rest)
	}
	head = append(make([]byte, 0, room), '{')
	if len(fields) > 0 {
		head = jsonbody.AppendObject(head[:0], fields)
		head[len(head)-1] = ','
	}
	if asked != "" {
		return append(append(head, rest[inside:place]...), asked...), rest[place+len(options.Raw):]
	}
	rest = rest[inside:]
	if left := bytes.TrimLeft(rest, " \t\r\n"); len(left) > 0 && left[0] == '}' { // there is nothing to be separated from
		if head[len(head)-1] = ' '; len(e.sets) > 0 {
			head = head[:len(head)-1]
		}
	}
	return head, rest
}

// others returns the client's members that are not among fields, as an object. asked takes the
// place of stream_options, unless it is empty.
func (e *edits) others(fields []jsonbody.Field, asked string) []byte {
	others := make([]jsonbody.Field, 0, len(e.client.Top))
	for _, m := range e.client.Top {
		switch {
		case slices.ContainsFunc(fields, func(f jsonbody.Field) bool { return f.Key == m.Key }):
		case m.Key == "stream_options" && asked != "":
			others = append(others, jsonbody.Field{Key: m.Key, Raw: asked})
		default:
			others = append(others, jsonbody.Field{Key: m.Key, Raw: m.Value.Raw})
		}
	}
	return jsonbody.AppendObject(nil, others)
}

// needsUsage reports whether a request is for a stream without its usage, and can request it. Of
// several stream_options the last counts, as in Python.
func needsUsage(body *jsonbody.Body) bool {
	if !body.Get("stream").Bool() {
		return false
	}
	options := body.Get("stream_options")
	members := jsonbody.Members(options)
	return !jsonbody.FieldOf(members, "include_usage").Bool() && !jsonbody.FieldOf(members, "continuous_usage_stats").Bool() &&
		(options.Type == gjson.Null || options.IsObject()) // else the engine will name the fault
}

// askUsage returns stream_options with a request for usage.
func askUsage(options gjson.Result) []byte {
	return jsonbody.Merge(options, jsonbody.Field{Key: "include_usage", Raw: "true"})
}

// edit adds to the request what its worker needs.
func (p *Proxy) edit(u *sending, x *Exchange) {
	t := &x.Decision.Target
	if p.packers.has(t) && u.maySendAgain(x) { // as its client wrote it
		if u.edits.usage = false; u.Migration != nil {
			u.Migration.refused()
		}
	}
	params := u.transfer
	if params == "" {
		params = pullParams(u, &x.Decision)
	}
	p.addTokens(u, t, params)
	if m := u.Migration; m != nil && !m.begun {
		if p.refusers.has(t) {
			m.refused()
		}
		u.edits.add(m.ask(t, u.Body)...)
	}
}
