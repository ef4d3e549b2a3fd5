package doctor

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/web"
	"kvrouter/internal/workers"
)

const (
	// maxAnswer bounds what is read of a worker's answer, bytes.
	maxAnswer = 16 << 20
	// maxShown bounds what is shown of a foreign text, bytes.
	maxShown = 200
	// maxCaches bounds the different settings of the KV cache that are shown of a worker.
	maxCaches = 4
	// waits bounds the look at one worker, however many ranks it names, in --wait.
	waits = 10
	// skewNoted is how far a worker's clock may be off, beyond the second that a Date
	// header leaves open.
	skewNoted = 2 * time.Second
)

// patient is one worker and what was found of it.
type patient struct {
	report    report
	host      string // of its URL
	models    []string
	version   string
	endpoints []string // of its KV events
}

// answer is what a worker answered.
type answer struct {
	status int
	body   []byte
	skew   time.Duration // of its clock, as far as its Date header shows; 0: none
}

// visitor asks one worker.
type visitor struct {
	client *http.Client
	at     workers.Attached
	key    kv.Secret
	wait   time.Duration // for each answer
}

// ask sends a request and reads its answer, whatever its status.
func (v visitor) ask(ctx context.Context, method, path string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, v.wait)
	defer cancel()
	var body io.Reader
	if method == http.MethodPost {
		body = strings.NewReader("{}")
	}
	request, err := http.NewRequestWithContext(ctx, method, v.at.URL+path, body)
	if err != nil {
		return answer{}, err
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	if v.key != "" {
		request.Header.Set("Authorization", "Bearer "+string(v.key))
	}
	asked := time.Now()
	response, err := v.client.Do(request)
	if err != nil {
		return answer{}, errors.Unwrap(err) // without the URL, which the finding names
	}
	defer func() { _ = response.Body.Close() }()
	a := answer{status: response.StatusCode, skew: skewOf(response.Header.Get("Date"), asked, time.Now())}
	if a.body, err = io.ReadAll(io.LimitReader(response.Body, maxAnswer)); err != nil {
		return answer{}, err
	}
	return a, nil
}

// skewOf returns how far a server's clock is ahead, if its Date cannot be explained by
// the time between question and answer and by its whole seconds.
func skewOf(date string, asked, answered time.Time) time.Duration {
	told, err := http.ParseTime(date)
	switch {
	case err != nil:
		return 0
	case told.After(answered):
		return told.Sub(answered)
	case told.Add(time.Second).Before(asked):
		return told.Add(time.Second).Sub(asked)
	}
	return 0
}

// lookAtWorker looks at one worker that runs already.
func (c Command) lookAtWorker(ctx context.Context, s Setup, at workers.Attached) patient {
	transport := web.NewTransport(s.TLS)
	transport.DisableKeepAlives = true
	v := visitor{client: web.NewClient(transport), at: at, key: cmp.Or(at.Key, s.Key), wait: c.Wait}
	p := patient{report: report{about: fmt.Sprintf("worker %d, %s", at.ID, at.URL)}}
	if u, err := url.Parse(at.URL); err == nil {
		p.host = u.Hostname()
	}
	r := &p.report
	ctx, cancel := context.WithTimeout(ctx, waits*c.Wait)
	defer cancel()
	health, err := v.ask(ctx, http.MethodGet, "/health")
	switch {
	case err != nil:
		r.mend("does not answer: "+shorten(err.Error()), "start it there, or correct url= of --worker")
		return p
	case health.status >= http.StatusInternalServerError:
		r.mend(fmt.Sprintf("is not well: /health answers %d", health.status), "look into its log")
	}
	if skew := health.skew; skew.Abs() > skewNoted {
		r.note(fmt.Sprintf("its clock is %v off this one's", skew.Round(time.Second)), "set both by NTP: the measured lag of KV events is wrong by as much")
	}
	if !v.lookAtModels(ctx, &p) {
		return p
	}
	told, err := v.ask(ctx, http.MethodGet, "/server_info")
	if err == nil && told.status == http.StatusNotFound { // an older SGLang
		told, err = v.ask(ctx, http.MethodGet, "/get_server_info")
	}
	if err == nil && told.status == http.StatusOK {
		if server, is := workers.ReadSGLang(told.body, at); is {
			v.lookAtSGLang(ctx, s, server, &p)
			return p
		}
	}
	v.lookAtVLLM(ctx, s, &p)
	return p
}

// lookAtModels looks at what a worker serves; false: it does not let us look at it.
func (v visitor) lookAtModels(ctx context.Context, p *patient) bool {
	r := &p.report
	listed, err := v.ask(ctx, http.MethodGet, "/v1/models")
	if err != nil {
		r.mend("/v1/models does not answer: "+shorten(err.Error()), "look into its log")
		return false
	}
	if listed.status == http.StatusUnauthorized || listed.status == http.StatusForbidden {
		r.mend("asks for a key", "name the environment variable that holds it: key-env= in --worker, or --worker-api-key-env")
		return false
	}
	var list struct {
		Data []struct {
			ID     string
			Parent *string
		}
	}
	if err := json.Unmarshal(listed.body, &list); listed.status != http.StatusOK || err != nil || len(list.Data) == 0 {
		r.mend(fmt.Sprintf("/v1/models answers %d and names no model", listed.status), "name the address of a vLLM or SGLang server by url= of --worker")
		return false
	}
	for _, model := range list.Data {
		if model.Parent == nil || *model.Parent == "" {
			p.models = append(p.models, shorten(model.ID))
		}
	}
	slices.Sort(p.models)
	return true
}

// lookAtVLLM looks at the flags of a vLLM.
func (v visitor) lookAtVLLM(ctx context.Context, s Setup, p *patient) {
	r := &p.report
	var told struct{ Version string }
	if a, err := v.ask(ctx, http.MethodGet, "/version"); err == nil {
		_ = json.Unmarshal(a.body, &told) // else it stays unknown
	}
	p.version = "vLLM " + cmp.Or(shorten(told.Version), "of an unknown version")
	r.ok("%s serves %s", p.version, listed(p.models))

	page, err := v.ask(ctx, http.MethodGet, "/metrics")
	var metrics workers.PageTold
	if err == nil && page.status != http.StatusOK {
		err = fmt.Errorf("it answers %d", page.status)
	}
	if err == nil {
		metrics, err = workers.ReadPage(bytes.NewReader(page.body))
	}
	if err == nil {
		err = metrics.Load
	}
	switch {
	case v.at.Load != "":
	case err != nil:
		r.mend("its load is not known: /metrics: "+shorten(err.Error()), "start it without --disable-log-stats, or name load= in --worker")
	default:
		r.ok("tells its load on /metrics")
	}
	for _, kept := range cachesOf(metrics.Cache) {
		r.lookAtCache(s, kept.blockSize, kept.keeps, "--block-size", "start it with --enable-prefix-caching")
	}
	if len(metrics.Cache) == 0 {
		r.note("does not tell its block size", fmt.Sprintf("see that it runs with --block-size %d", s.BlockSize))
	}
	if s.KVEvents {
		sources, err := v.ask(ctx, http.MethodGet, "/kv_event_sources")
		if err == nil && sources.status != http.StatusOK {
			sources.body = nil // an older vLLM, or another server
		}
		found, err := workers.EventSourcesTold(sources.body, v.at)
		if err != nil {
			r.note(shorten(err.Error()), "")
		}
		v.lookAtEvents(ctx, found, kv.EngineVLLM, p)
	}
	v.lookAtLoad(ctx, v.at.Load, r)
	if a, err := v.ask(ctx, http.MethodPost, "/v1/chat/completions/render"); err == nil && (a.status == http.StatusNotFound || a.status == http.StatusMethodNotAllowed) {
		r.note("does not render prompts: those that the router cannot render itself are sent by load alone", "start it with --enable-scale-out")
	}
}

// cache is how a rank keeps prompts.
type cache struct {
	blockSize int // tokens; 0: not told
	keeps     bool
}

// cachesOf returns the different settings that a page tells, in its order, maxCaches at
// most.
func cachesOf(told []map[string]string) (found []cache) {
	for _, labels := range told {
		size, _ := strconv.Atoi(labels["block_size"])
		one := cache{size, !strings.EqualFold(labels["enable_prefix_caching"], "false")}
		if !slices.Contains(found, one) {
			if found = append(found, one); len(found) == maxCaches {
				break
			}
		}
	}
	return found
}

// lookAtSGLang looks at the flags of an SGLang server.
func (v visitor) lookAtSGLang(ctx context.Context, s Setup, server workers.SGLangTold, p *patient) {
	r := &p.report
	p.version = "SGLang " + cmp.Or(shorten(server.Version), "of an unknown version")
	r.ok("%s serves %s", p.version, listed(p.models))
	anew := server.Decodes && !server.Caches // as SGLang's decode servers do unless told otherwise
	r.lookAtCache(s, server.BlockSize, server.Caches || anew, "--page-size", server.Remedy)
	if anew {
		r.note("keeps no prompts: each is moved to it anew", server.Remedy)
	}
	if s.KVEvents && (!anew || v.at.KVEvents != "") {
		v.lookAtEvents(ctx, server.Sources, kv.EngineSGLang, p)
	}
	v.lookAtLoad(ctx, server.Load, r)
	if server.Load == "" {
		r.note("publishes no load: it is asked for every second", "start it with --load-publish-endpoint tcp://*:5657")
	}
}

// lookAtCache looks at the block size and whether prompts are kept at all.
func (r *report) lookAtCache(s Setup, size int, keeps bool, sizeFlag, keepRemedy string) {
	switch {
	case size == 0:
		r.note("does not tell its block size", fmt.Sprintf("see that it runs with %s %d", sizeFlag, s.BlockSize))
	case size != s.BlockSize:
		r.mend(fmt.Sprintf("its blocks have %d tokens, the router's %d: nothing would be found", size, s.BlockSize),
			fmt.Sprintf("start it with %s %d, or the router with --block-size %d", sizeFlag, s.BlockSize, size))
	default:
		r.ok("blocks of %d tokens, as in the router", size)
	}
	if !keeps {
		r.mend("keeps no prompts: prefix caching is off", keepRemedy)
	}
}

// compare looks at what workers should have in common, or must not.
func compare(seen []patient, r *report) {
	owner, told := map[string]string{}, map[string]bool{}
	var first *patient
	for i := range seen {
		p := &seen[i]
		for _, endpoint := range p.endpoints {
			if strings.HasPrefix(endpoint, "ipc://") {
				endpoint += " on " + p.host // a file of that host
			}
			if other, taken := owner[endpoint]; taken && other != p.report.about {
				r.mend(fmt.Sprintf("%s and %s name the same KV events, %s", other, p.report.about, shorten(endpoint)), "give each a port of its own in --kv-events-config, and correct kv-events= of --worker")
			}
			owner[endpoint] = p.report.about
		}
		if p.version == "" {
			continue
		}
		if first == nil {
			first = p
			continue
		}
		if !slices.Equal(p.models, first.models) && !told["models"] {
			told["models"] = true
			r.note(fmt.Sprintf("they serve different models: %s and %s", listed(first.models), listed(p.models)), "see that --model is that of all, or leave it out")
		}
		if p.version != first.version && !told["version"] {
			told["version"] = true
			r.note(fmt.Sprintf("they run different versions: %s and %s", first.version, p.version), "")
		}
	}
}

// maxListed bounds the models of a worker that are shown.
const maxListed = 5

// listed names some of the models.
func listed(models []string) string {
	if more := len(models) - maxListed; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(models[:maxListed], ", "), more)
	}
	return strings.Join(models, ", ")
}

// shorten makes a foreign text fit to be shown on one line.
func shorten(text string) string {
	text = strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > maxShown {
		text = strings.ToValidUTF8(text[:maxShown], "") + "..."
	}
	return text
}
