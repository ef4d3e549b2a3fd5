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

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/prompt/tokens"
)

const (
	// maxAnswer bounds the part of a worker's answer that is read, bytes.
	maxAnswer = 16 << 20
	// maxShown bounds the part of a foreign text that is shown, bytes.
	maxShown = 200
	// maxCaches bounds the different KV-cache settings that are shown of a worker.
	maxCaches = 4
	// waits bounds the check of one worker, with any number of ranks, in multiples of --wait.
	waits = 10
	// Arguments of engines.
	promptDetails = "--enable-prompt-tokens-details"
	scaleOut      = "--enable-scale-out"
	cacheReport   = "--enable-cache-report"
	// skewNoted is the tolerated difference of a worker's clock, beyond the second of
	// resolution of a Date header.
	skewNoted = 2 * time.Second
)

// patient is one worker with its findings.
type patient struct {
	report    report
	host      string // of its URL
	models    []string
	owner     string // of its models, as it says
	version   string
	endpoints []string // of its KV events
	lacks     []string // arguments that its command line lacks
}

// answer is a worker's answer.
type answer struct {
	status int
	body   []byte
	skew   time.Duration // of its clock, as far as its Date header shows; 0: none
}

// visitor checks one worker.
type visitor struct {
	client *http.Client
	at     probe.Server
	key    kv.Secret
	wait   time.Duration // for each answer
}

// ask sends a request and reads its answer, whatever its status.
func (v visitor) ask(ctx context.Context, method, path string) (answer, error) {
	var body io.Reader
	if method == http.MethodPost {
		body = strings.NewReader("{}")
	}
	return v.send(ctx, method, path, body)
}

// post implements tokens.Asker.
func (v visitor) post(ctx context.Context, path string, body []byte) ([]byte, error) {
	a, err := v.send(ctx, http.MethodPost, path, bytes.NewReader(body))
	if err == nil && a.status != http.StatusOK {
		err = &tokens.AskError{Status: a.status, Answer: a.body}
	}
	return a.body, err
}

func (v visitor) send(ctx context.Context, method, path string, body io.Reader) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, v.wait)
	defer cancel()
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

// skewOf returns how far a server's clock is ahead, beyond the time between question and
// answer and the whole seconds of its Date.
func skewOf(date string, asked, answered time.Time) time.Duration {
	shown, err := http.ParseTime(date)
	switch {
	case err != nil:
		return 0
	case shown.After(answered):
		return shown.Sub(answered)
	case shown.Add(time.Second).Before(asked):
		return shown.Add(time.Second).Sub(asked)
	}
	return 0
}

// checkWorker checks one worker that runs already.
func (c Command) checkWorker(ctx context.Context, s Setup, at probe.Server) (p patient) {
	transport := web.NewTransport(s.TLS)
	transport.DisableKeepAlives = true
	v := visitor{client: web.NewClient(transport), at: at, key: cmp.Or(at.Key, s.Key), wait: c.Wait}
	p = patient{report: report{about: fmt.Sprintf("worker %d, %s", at.ID, at.URL)}}
	if u, err := url.Parse(at.URL); err == nil {
		p.host = u.Hostname()
	}
	r := &p.report
	ctx, cancel := context.WithTimeout(ctx, waits*c.Wait)
	defer cancel()
	health, err := v.ask(ctx, http.MethodGet, "/health")
	switch {
	case err != nil:
		r.fail("does not answer: "+shorten(err.Error()), "start it at this address, or correct url= of --worker")
		return p
	case health.status >= http.StatusInternalServerError && health.status != http.StatusNotImplemented:
		r.fail(fmt.Sprintf("is unhealthy: /health answers %d", health.status), "see its log")
	}
	if skew := health.skew; skew.Abs() > skewNoted && at.Kind != kv.KindRouter {
		r.note(fmt.Sprintf("its clock differs from this machine's by %v", skew.Round(time.Second)),
			"synchronize both by NTP: the measured lag of KV events is off by the difference")
	}
	if at.Kind == kv.KindRouter {
		v.checkCell(ctx, s, &p)
		return p
	}
	if !v.checkModels(ctx, health, &p) {
		return p
	}
	defer func() { p.adviseAll() }()
	info, err := v.ask(ctx, http.MethodGet, "/server_info")
	if err == nil && info.status == http.StatusNotFound { // an older SGLang
		info, err = v.ask(ctx, http.MethodGet, "/get_server_info")
	}
	if err == nil && info.status == http.StatusOK {
		if server := probe.ParseServerInfo(info.body); server != nil {
			v.checkSGLang(ctx, s, server, &p)
			return p
		}
	}
	page, err := v.ask(ctx, http.MethodGet, "/metrics")
	if err == nil && page.status != http.StatusOK {
		err = fmt.Errorf("it answers %d", page.status)
	}
	name, version := v.engineOf(ctx, p.owner, page.body)
	p.version = strings.TrimSpace(name + " " + shorten(version))
	if name == nameVLLM {
		v.checkVLLM(ctx, s, page, err, &p)
	} else {
		v.checkOther(ctx, s, &p)
	}
	return p
}

// missing reports whether a server has no such route.
func (a answer) missing() bool {
	return a.status == http.StatusNotFound || a.status == http.StatusMethodNotAllowed || a.status == http.StatusNotImplemented
}

// checkModels checks the models of a worker that answers this about its health; false: it cannot be
// checked further.
func (v visitor) checkModels(ctx context.Context, health answer, p *patient) bool {
	r := &p.report
	listed, err := v.ask(ctx, http.MethodGet, "/v1/models")
	if err != nil {
		r.fail("/v1/models does not answer: "+shorten(err.Error()), "see its log")
		return false
	}
	if listed.status == http.StatusUnauthorized || listed.status == http.StatusForbidden {
		r.fail("requires an API key", "set key-env= of --worker, or --worker-api-key-env, to the environment variable with the key")
		return false
	}
	var list struct {
		Data []struct {
			ID     string
			Owner  string `json:"owned_by"`
			Parent *string
		}
	}
	if listed.missing() {
		chats, err := v.ask(ctx, http.MethodPost, "/v1/chat/completions")
		if err != nil || chats.missing() {
			r.fail("has neither /v1/models nor /v1/chat/completions", "give the URL of an OpenAI server")
			return false
		}
		text := "does not list its models: requests for any model are sent to it"
		if health.missing() {
			text += "; nor does it say whether it is healthy: it counts as healthy while it accepts connections"
		}
		r.note(text, "")
		return true
	}
	if err := json.Unmarshal(listed.body, &list); listed.status != http.StatusOK || err != nil || len(list.Data) == 0 {
		r.fail(fmt.Sprintf("/v1/models answers %d and names no model", listed.status),
			"give the URL of an OpenAI server, and wait until it has loaded a model")
		return false
	}
	p.owner = list.Data[0].Owner
	for _, model := range list.Data {
		if model.Parent == nil || *model.Parent == "" {
			p.models = append(p.models, shorten(model.ID))
		}
	}
	slices.Sort(p.models)
	return true
}

// checkCell checks a router below.
func (v visitor) checkCell(ctx context.Context, s Setup, p *patient) {
	r := &p.report
	client := cells.NewClient(cells.Settings{TLS: s.TLS})
	defer client.Close()
	stream, err := client.Open(ctx, v.at.URL, v.key, &summary.View{})
	if err != nil {
		r.fail("cannot be followed: "+shorten(err.Error()), "see docs/cells.md")
		return
	}
	defer stream.Close()
	hello, first := stream.Hello, stream.First
	for _, model := range first.Info.Models {
		if !slices.Contains(first.Info.Adapters, model) {
			p.models = append(p.models, shorten(model))
		}
	}
	slices.Sort(p.models)
	p.version = "kvrouter " + shorten(hello.Version)
	r.ok("%s serves %s with %d workers", p.version, listed(p.models), first.State.Workers)
	if !first.State.Ready {
		r.note("has no worker that is ready", "see its GET /workers")
	}
	if !hello.Summary {
		r.note("reports no summary of its workers' caches", "start it with --cell; without a summary it is routed by load alone")
	}
}

// checkVLLM checks the flags of a vLLM server with this metrics page, or the error of it.
func (v visitor) checkVLLM(ctx context.Context, s Setup, page answer, err error, p *patient) {
	r := &p.report
	r.ok("%s serves %s", p.version, listed(p.models))
	var metrics probe.Page
	if err == nil {
		metrics, err = probe.ParsePage(bytes.NewReader(page.body))
	}
	if err == nil {
		_, err = metrics.Load("")
	}
	switch {
	case v.at.Load != "":
	case err != nil:
		r.fail("its load is unknown: /metrics: "+shorten(err.Error()), "start it without --disable-log-stats, or set load= of --worker")
	default:
		r.ok("reports its load on /metrics")
	}
	for _, kept := range cachesOf(metrics.Caches()) {
		r.checkCache(kept.blockSize, kept.keeps, "start it with --enable-prefix-caching")
	}
	if slices.ContainsFunc(metrics.Caches(), probe.FindsParts) {
		r.note("predictions are not exact: its KV events do not say which parts of blocks --prefix-match-unit makes it find", "")
	}
	if len(metrics.Caches()) == 0 {
		r.checkCache(0, true, "")
	}
	v.checkVLLMTiers(ctx, s, page.body, r)
	if s.KVEvents {
		sources, err := v.ask(ctx, http.MethodGet, "/kv_event_sources")
		if err == nil && sources.status != http.StatusOK {
			sources.body = nil // an older vLLM, or another server
		}
		found, err := probe.ParseEventSources(sources.body, v.at)
		if err != nil {
			r.note(shorten(err.Error()), "")
		}
		if engines := len(metrics.Caches()); len(found) > 0 && engines > len(found) {
			r.note(fmt.Sprintf("has %d data-parallel ranks and names the KV events of %d: it chooses the rank of each request itself, and "+
				"predictions are not exact", engines, len(found)),
				"run a vLLM with /kv_event_sources, or a server for each rank")
		}
		if len(found) > 0 {
			v.checkEvents(ctx, found, p)
		} else {
			p.noEvents(kv.EngineVLLM, s.shift(v, len(metrics.Caches())))
		}
	}
	size := s.BlockSize
	if caches := cachesOf(metrics.Caches()); len(caches) > 0 {
		size = caches[0].blockSize
	}
	if reports, known := v.reportsCached(ctx, p, size); known && !reports {
		p.lack(promptDetails)
		r.note("its answers do not say how many tokens were cached: predictions are not verified", "start it with "+promptDetails)
	}
	v.checkLoad(ctx, v.at.Load, r)
	v.checkTokens(ctx, s, false, r)
	if a, err := v.ask(ctx, http.MethodPost, "/v1/chat/completions/render"); err == nil &&
		(a.missing() || a.status == http.StatusForbidden) {
		p.lack(scaleOut)
		r.note("does not render prompts: those with media, and of /v1/responses and /v1/messages, are routed by load only", "start it with "+scaleOut)
	}
}

// checkTokens checks whether a worker takes the tokens of prompts.
func (v visitor) checkTokens(ctx context.Context, s Setup, sglang bool, r *report) {
	if !s.SendTokens {
		return
	}
	takes, err := tokens.NewSource(nil, nil, v.wait, silent()).AskTakes(ctx, tokens.Peer{SGLang: sglang, Ask: v.post})
	switch routes := takes.Routes(); {
	case err != nil:
		r.note("does not say whether it takes the tokens of prompts: "+shorten(err.Error()), "")
	case len(routes) == 0:
		r.note("tokenizes prompts itself: it does not take their tokens",
			"run vLLM 0.32, SGLang 0.5.23 or a newer one, for a faster first token of long prompts")
	default:
		r.ok("takes the tokens of long prompts on %s", strings.Join(routes, " and "))
	}
}

// cache is the KV-cache settings of a rank.
type cache struct {
	blockSize int // tokens; 0: unknown
	keeps     bool
}

// cachesOf returns the different settings of a page, in its order, maxCaches at most.
func cachesOf(shown []map[string]string) (found []cache) {
	for _, labels := range shown {
		one := cache{probe.BlockOf(labels), !strings.EqualFold(labels["enable_prefix_caching"], "false")}
		if !slices.Contains(found, one) {
			if found = append(found, one); len(found) == maxCaches {
				break
			}
		}
	}
	return found
}

// checkSGLang checks the flags of an SGLang server.
func (v visitor) checkSGLang(ctx context.Context, s Setup, server *probe.ServerInfo, p *patient) {
	r := &p.report
	p.version = "SGLang " + cmp.Or(shorten(server.Version), "of an unknown version")
	r.ok("%s serves %s", p.version, listed(p.models))
	keeps, remedy := server.KeepsPrompts()
	if predictions := server.Predictions(); predictions != "" {
		r.note("predictions are not exact: "+predictions, "")
	}
	r.checkSGLangTiers(server)
	if server.Speculation != "" {
		r.ok("drafts tokens by %s", shorten(server.Speculation))
	}
	anew := server.Decodes() && !keeps // the default of SGLang's decode servers
	r.checkCache(server.BlockSize(), keeps || anew, remedy)
	if anew {
		r.note("caches no prompts: each is transferred to it again", remedy)
	}
	sources := server.Sources(v.at)
	silent := s.KVEvents && len(sources) == 0 && !anew
	switch {
	case silent:
		p.noEvents(kv.EngineSGLang, s.shift(v, server.Ranks()))
	case s.KVEvents && len(sources) > 0 && (!anew || v.at.KVEvents != ""):
		v.checkEvents(ctx, sources, p)
	}
	if reports := server.CacheReport; reports != nil && !*reports {
		p.lack(cacheReport)
		r.note("its answers do not say how many tokens were cached: predictions are not verified", "start it with "+cacheReport)
	}
	if server.Mode != nil && *server.Mode == "null" { // a part of a pair answers no request alone
		v.checkTokens(ctx, s, true, r)
	}
	load := server.Load(v.at, 0)
	v.checkLoad(ctx, load, r)
	if load == "" && !silent { // its remedy has the endpoint
		flag := fmt.Sprintf("--load-publish-endpoint tcp://*:%d", 5657+s.shift(v, server.Ranks()))
		p.lack(flag)
		r.note("publishes no load: the router polls it every second", "start it with "+flag)
	}
}

// checkCache shows the block size, and checks whether prompts are cached at all.
func (r *report) checkCache(size int, keeps bool, keepRemedy string) {
	if size == 0 {
		r.note("does not report its block size: its KV events do", "")
	} else {
		r.ok("blocks of %d tokens", size)
	}
	if !keeps {
		r.fail("caches no prompts: prefix caching is off", keepRemedy)
	}
}

// compare checks what workers should have in common, or must not.
func compare(seen []patient, r *report) {
	owner, reported := map[string]string{}, map[string]bool{}
	var first *patient
	for i := range seen {
		p := &seen[i]
		for _, endpoint := range p.endpoints {
			if strings.HasPrefix(endpoint, "ipc://") {
				endpoint += " on " + p.host // a file of that host
			}
			if other, taken := owner[endpoint]; taken && other != p.report.about {
				r.fail(fmt.Sprintf("%s and %s have the same KV event endpoint, %s", other, p.report.about, shorten(endpoint)),
					"give each its own port in --kv-events-config, and correct kv-events= of --worker")
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
		if !slices.Equal(p.models, first.models) && !reported["models"] {
			reported["models"] = true
			r.note(fmt.Sprintf("the workers serve different models: %s and %s", listed(first.models), listed(p.models)),
				"set --model to the model of all workers, or leave it out")
		}
		if p.version != first.version && !reported["version"] {
			reported["version"] = true
			r.note(fmt.Sprintf("the workers run different versions: %s and %s", first.version, p.version), "")
		}
	}
}

// maxListed bounds the models of a worker that are shown.
const maxListed = 5

// listed names the first models.
func listed(models []string) string {
	if more := len(models) - maxListed; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(models[:maxListed], ", "), more)
	}
	return strings.Join(models, ", ")
}

// shorten makes an untrusted text printable on one line.
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
