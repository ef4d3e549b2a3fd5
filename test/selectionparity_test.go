package test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// parityPython names the Python that has ai-dynamo-runtime; make parity sets it.
const parityPython = "KVROUTER_DYNAMO_PYTHON"

// dynamoService starts python -m dynamo.select_service and returns its URL.
func dynamoService(t *testing.T, args ...string) string {
	t.Helper()
	python := os.Getenv(parityPython)
	if python == "" {
		t.Skip("needs Dynamo's selection service: run it with `make parity`")
	}
	port := testkit.FreePorts(t, 1)
	command := exec.Command(python, append([]string{"-m", "dynamo.select_service", "--port", fmt.Sprint(port)}, args...)...)
	log := &testkit.LogBuffer{}
	command.Stdout, command.Stderr = log, log
	command.WaitDelay = 5 * time.Second
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		command.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		command.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			command.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("end of the service's log:\n%s", log.String()[max(0, len(log.String())-3000):])
		}
	})
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	testkit.Eventually(t, 60*time.Second, "Dynamo's selection service answers", func() bool {
		response, err := http.Get(url + "/health")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return url
}

// normal writes a value in one form, whatever the order of its keys.
func normal(v gjson.Result) string {
	if v.IsObject() {
		members := v.Map()
		var parts []string
		for _, name := range slices.Sorted(maps.Keys(members)) {
			parts = append(parts, name+":"+normal(members[name]))
		}
		return "{" + strings.Join(parts, ",") + "}"
	}
	return v.Raw
}

func place(row gjson.Result) string {
	return fmt.Sprintf("%d/%d", row.Get("worker_id").Uint(), row.Get("dp_rank").Uint())
}

// rows sorts a list of per-rank objects and keeps the fields named.
func rows(list gjson.Result, fields ...string) []string {
	var out []string
	for _, row := range list.Array() {
		text := fmt.Sprintf("%d/%d", row.Get("worker_id").Uint(), row.Get("dp_rank").Uint())
		for _, field := range fields {
			text += fmt.Sprintf(" %s=%s", field, row.Get(field).Raw)
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return out
}

// heldIn makes of a dump a sorted list of what each rank holds after what.
func heldIn(dump gjson.Result) []string {
	held := map[string]bool{}
	dump.ForEach(func(name, part gjson.Result) bool {
		for _, e := range part.Get("events").Array() {
			stored := e.Get("event.data.stored")
			parent := stored.Get("parent_hash").Raw
			for _, b := range stored.Get("blocks").Array() {
				held[fmt.Sprintf("%s bs=%s %s/%s %s>%s %s", name, part.Get("block_size").Raw, e.Get("worker_id").Raw, e.Get("event.dp_rank").Raw,
					cmp.Or(parent, "null"), b.Get("block_hash").Raw, b.Get("tokens_hash").Raw)] = true
				parent = b.Get("block_hash").Raw
			}
		}
		return true
	})
	return slices.Sorted(maps.Keys(held))
}

// missing shows what a has that b has not.
func missing(a, b []string) string {
	var only []string
	for _, line := range a {
		if _, found := slices.BinarySearch(b, line); !found {
			only = append(only, line)
		}
	}
	return fmt.Sprintf("%d blocks, %d of them alone: %.400s", len(a), len(only), strings.Join(only, "; "))
}

// The parity test sends the same operations to this router and to Dynamo's
// standalone selection service and compares every answer. `make parity` runs
// it: it needs a Python with ai-dynamo-runtime, named by parityPython.
const (
	parityOperations = 3000
	parityBlockSize  = 4
	parityModel      = "m"
)

// parityRank is one rank of a worker of the test.
type parityRank struct {
	key    kv.WorkerKey
	events *mocker.Events
	// held are the engine hashes of the blocks that the rank has reported, with
	// those of their parents (0: none) and how many blocks follow each.
	held     map[uint64]uint64
	children map[uint64]int
	sentinel uint32
}

// parity drives both services.
type parity struct {
	*testing.T
	ours, theirs string
	random       *rand.Rand
	ranks        []*parityRank
	specs        map[uint64]map[string]any // what the workers were registered with
	ids          []uint64                  // of the workers
	prompts      [][]uint32
	reserved     []string
	next         int // number of the next reservation or sentinel
	operations   map[string]int
	ties         int // choices of another one of several equally cheap ranks
	weighted     int // choices that differ by the override overlap_score_weight
	failures     int
}

const maxParityFailures = 12

// differ reports an answer that differs where it should not.
func (p *parity) differ(what string, query any, ours, theirs any) {
	p.Helper()
	text, _ := json.Marshal(query)
	p.Errorf("operation %d: %s %.600s\n ours   %v\n theirs %v", p.count(), what, text, ours, theirs)
	if p.failures++; p.failures >= maxParityFailures {
		p.FailNow()
	}
}

func (p *parity) count() int {
	n := 0
	for _, times := range p.operations {
		n += times
	}
	return n
}

// both sends a request to both and compares the status and, for an error, its
// text.
func (p *parity) both(method, path string, query any) (ours, theirs reply) {
	p.Helper()
	theirs = ask(p, p.theirs, method, path, query)
	ours = ask(p, p.ours, method, path, query)
	if ours.status != theirs.status || ours.status >= 300 && ours.Get("error").String() != theirs.Get("error").String() {
		p.differ(method+" "+path, query, fmt.Sprint(ours.status, " ", ours.Raw), fmt.Sprint(theirs.status, " ", theirs.Raw))
	}
	return ours, theirs
}

// same compares fields of two answers.
func (p *parity) same(what string, query any, ours, theirs gjson.Result, fields ...string) {
	p.Helper()
	for _, field := range fields {
		if a, b := normal(ours.Get(field)), normal(theirs.Get(field)); a != b {
			p.differ(what+" "+field, query, a, b)
		}
	}
}

func (p *parity) sameRows(what string, query any, ours, theirs gjson.Result, fields ...string) {
	p.Helper()
	if a, b := rows(ours, fields...), rows(theirs, fields...); !slices.Equal(a, b) {
		p.differ(what, query, strings.Join(a, "; "), strings.Join(b, "; "))
	}
}

// addWorker registers a worker with its publishers at both.
func (p *parity) addWorker(id uint64, start, count int) {
	p.Helper()
	endpoints := map[string]string{}
	var added []*parityRank
	for rank := start; rank < start+count; rank++ {
		events, err := mocker.NewEvents("127.0.0.1:0", "127.0.0.1:0", parityBlockSize)
		if err != nil {
			p.Fatal(err)
		}
		events.Rank = rank
		p.Cleanup(events.Close)
		endpoints[fmt.Sprint(rank)] = events.Pub.Endpoint()
		added = append(added, &parityRank{key: kv.WorkerKey{Worker: id, Rank: uint32(rank)}, events: events, held: map[uint64]uint64{}, children: map[uint64]int{}})
	}
	query := map[string]any{
		"worker_id": id, "model_name": parityModel, "endpoint": deadURL(p), "block_size": parityBlockSize,
		"max_num_batched_tokens": 8192, "total_kv_blocks": 1000,
	}
	if count == 1 && start == 0 {
		query["kv_events_endpoint"] = endpoints["0"]
	} else {
		query["kv_events_endpoints"], query["data_parallel_start_rank"], query["data_parallel_size"] = endpoints, start, count
	}
	ours, theirs := p.both("POST", "/workers", query)
	p.same("POST /workers", query, ours.Result, theirs.Result, workerFields...)
	for _, r := range added {
		testkit.Eventually(p, 20*time.Second, "both follow the events", func() bool { return r.events.Pub.Subscribers() >= 2 })
	}
	p.ranks, p.ids, p.specs[id] = append(p.ranks, added...), append(p.ids, id), query
	p.settleWorkers()
	for _, r := range added {
		p.publish(r)
	}
}

var workerFields = []string{
	"worker_id", "model_name", "routing_group", "lifecycle", "endpoint", "block_size", "max_num_batched_tokens", "total_kv_blocks", "not_schedulable_reasons",
}

func (p *parity) removeWorker(id uint64) {
	p.Helper()
	path := fmt.Sprintf("/workers/%d", id)
	ours, theirs := p.both("DELETE", path, nil)
	p.same("DELETE "+path, nil, ours.Result, theirs.Result, workerFields...)
	p.ids = slices.DeleteFunc(p.ids, func(have uint64) bool { return have == id })
	p.ranks = slices.DeleteFunc(p.ranks, func(r *parityRank) bool { return r.key.Worker == id })
	p.settleWorkers()
}

// settleWorkers waits until the service's books have the workers that are
// registered, which is a moment after its answer.
func (p *parity) settleWorkers() {
	p.Helper()
	var want []string
	for _, r := range p.ranks {
		want = append(want, fmt.Sprintf("%d/%d", r.key.Worker, r.key.Rank))
	}
	slices.Sort(want)
	testkit.Eventually(p, 10*time.Second, "the service's books have its workers", func() bool {
		return slices.Equal(rows(ask(p, p.theirs, "GET", "/loads", nil).Get("0.loads")), want)
	})
}

// publish sends events of a rank to both and waits until both have applied
// them: the last block that a batch stores is one of its own.
func (p *parity) publish(r *parityRank, events ...mocker.Event) {
	p.Helper()
	if r.sentinel != 0 {
		events = append([]mocker.Event{{Removed: []uint64{uint64(r.sentinel)}}}, events...)
	}
	p.next++
	r.sentinel = 1<<30 + uint32(p.next)
	tokens := []uint32{r.sentinel, 1, 2, 3}
	events = append(events, mocker.Event{Stored: []kv.StoredBlock{{Engine: uint64(r.sentinel)}}, Tokens: tokens})
	r.events.PublishNow(events...)
	query := map[string]any{"model_name": parityModel, "token_ids": tokens}
	for _, base := range []string{p.ours, p.theirs} {
		testkit.Eventually(p, 20*time.Second, base+" has applied the events", func() bool {
			for _, w := range ask(p, base, "POST", "/overlap_scores", query).Get("workers").Array() {
				if w.Get("worker_id").Uint() == r.key.Worker && w.Get("dp_rank").Uint() == uint64(r.key.Rank) {
					return w.Get("device_blocks").Int() == 1
				}
			}
			return false
		})
	}
}

// parityHashes are what the test's engines call the blocks of a prompt.
func parityHashes(tokens []uint32) []uint64 {
	hashes := kv.SequenceHashes(nil, kv.HashBlocks(nil, tokens, parityBlockSize, "", ""))
	for i := range hashes {
		hashes[i] = hashes[i]*0x9e3779b97f4a7c15 | 1
	}
	return hashes
}

// store lets a rank store a prompt up to some block.
func (r *parityRank) store(tokens []uint32, blocks int) (event mocker.Event, ok bool) {
	hashes := parityHashes(tokens)
	blocks = min(blocks, len(hashes))
	first := 0
	for first < blocks && hasKey(r.held, hashes[first]) {
		first++
	}
	if first == blocks {
		return event, false
	}
	event = mocker.Event{Tokens: tokens[first*parityBlockSize : blocks*parityBlockSize]}
	parent := uint64(0)
	if first > 0 {
		parent = hashes[first-1]
		event.Parent, event.HasParent = parent, true
	}
	for _, h := range hashes[first:blocks] {
		event.Stored = append(event.Stored, kv.StoredBlock{Engine: h})
		r.held[h] = parent
		r.children[parent]++
		parent = h
	}
	return event, true
}

func hasKey[K comparable, V any](m map[K]V, key K) bool {
	_, has := m[key]
	return has
}

// evict lets a rank remove up to n blocks that none follows.
func (r *parityRank) evict(n int, random *rand.Rand) (event mocker.Event, ok bool) {
	for range n {
		var leaves []uint64
		for _, h := range slices.Sorted(maps.Keys(r.held)) {
			if r.children[h] == 0 {
				leaves = append(leaves, h)
			}
		}
		if len(leaves) == 0 {
			break
		}
		h := leaves[random.IntN(len(leaves))]
		r.children[r.held[h]]--
		delete(r.held, h)
		event.Removed = append(event.Removed, h)
	}
	return event, event.Removed != nil
}

// prompt takes a known prompt, often with something added or cut off, or a new
// one.
func (p *parity) prompt() []uint32 {
	var tokens []uint32
	if len(p.prompts) > 0 && p.random.IntN(8) > 0 {
		tokens = slices.Clone(p.prompts[p.random.IntN(len(p.prompts))])
		switch p.random.IntN(3) {
		case 0:
			tokens = tokens[:1+p.random.IntN(len(tokens))]
		case 1:
			return tokens
		}
	}
	for range 1 + p.random.IntN(40) {
		tokens = append(tokens, p.random.Uint32N(50))
	}
	if len(tokens) > 200 {
		tokens = tokens[:200]
	}
	if len(p.prompts) < 60 {
		p.prompts = append(p.prompts, tokens)
	} else {
		p.prompts[p.random.IntN(len(p.prompts))] = tokens
	}
	return tokens
}

// events lets a rank store or remove some blocks.
func (p *parity) events() {
	r := p.ranks[p.random.IntN(len(p.ranks))]
	var events []mocker.Event
	for range 1 + p.random.IntN(3) {
		var event mocker.Event
		var ok bool
		if p.random.IntN(3) == 0 {
			event, ok = r.evict(1+p.random.IntN(8), p.random)
		} else {
			event, ok = r.store(p.prompt(), 1+p.random.IntN(50))
		}
		if ok {
			events = append(events, event)
		}
	}
	if p.random.IntN(60) == 0 {
		clear(r.held)
		clear(r.children)
		r.sentinel = 0
		events = append(events, mocker.Event{Cleared: true})
	}
	p.publish(r, events...)
}

// selection makes up what may be asked of a select.
func (p *parity) selection() map[string]any {
	query := map[string]any{"model_name": parityModel, "token_ids": p.prompt()}
	if p.random.IntN(25) == 0 {
		query["token_ids"] = []uint32{}
	}
	switch p.random.IntN(10) {
	case 0:
		query["router_config_override"] = map[string]any{"overlap_score_weight": []float64{0, 0.5, 1, 2, 4}[p.random.IntN(5)]}
	case 1:
		allowed := []uint64{}
		for _, id := range p.ids {
			if p.random.IntN(2) == 0 {
				allowed = append(allowed, id)
			}
		}
		query["allowed_worker_ids"] = allowed
	case 2:
		key := p.ranks[p.random.IntN(len(p.ranks))].key
		query["pinned_worker"] = map[string]any{"worker_id": key.Worker, "dp_rank": key.Rank}
	case 3:
		query["router_config_override"] = map[string]any{"assume_kv_reuse": false}
	case 4:
		query["router_config_override"] = map[string]any{"track_prefill_tokens": false}
	case 5:
		query["expected_output_tokens"] = 1 + p.random.IntN(200)
	case 6:
		query["priority_jump"], query["strict_priority"], query["session_id"] = 2.5, 3, "s"
	}
	return query
}

// parityCosts are what each rank that may be chosen would cost, by the loads that
// the service shows.
type parityCosts struct {
	// ours are by this router's rule, theirs by the service's: it takes the
	// override overlap_score_weight and does not apply it.
	ours, theirs map[string]float64
}

func (p *parity) costs(query map[string]any) parityCosts {
	p.Helper()
	overrides, _ := query["router_config_override"].(map[string]any)
	loads := map[string]any{"model_name": parityModel, "token_ids": query["token_ids"]}
	if overrides != nil {
		loads["router_config_override"] = overrides
	}
	ours, theirs := p.both("POST", "/potential_loads", loads)
	p.sameRows("POST /potential_loads", loads, ours.Result, theirs.Result, "potential_prefill_tokens", "potential_decode_blocks", "active_requests")
	cached := map[string]float64{}
	for _, row := range ask(p, p.theirs, "POST", "/overlap_scores", loads).Get("workers").Array() {
		cached[place(row)] = row.Get("device_blocks").Float() + 0.75*row.Get("host_pinned_extension_blocks").Float() + 0.25*row.Get("disk_extension_blocks").Float()
	}
	weight, weighted := overrides["overlap_score_weight"].(float64)
	costs := parityCosts{map[string]float64{}, map[string]float64{}}
	for _, row := range theirs.Array() {
		if allowed, ok := query["allowed_worker_ids"].([]uint64); ok && !slices.Contains(allowed, row.Get("worker_id").Uint()) {
			continue
		}
		at := place(row)
		prefill, decode := row.Get("potential_prefill_tokens").Float()/parityBlockSize, row.Get("potential_decode_blocks").Float()
		if overrides["track_prefill_tokens"] == false {
			prefill, decode = 0, max(0, decode-cached[at])
		}
		costs.ours[at], costs.theirs[at] = prefill+decode, prefill+decode
		if weighted {
			costs.ours[at] = weight*prefill + decode
		}
	}
	return costs
}

// least is the lowest cost.
func least(costs map[string]float64) float64 {
	lowest := math.Inf(1)
	for _, cost := range costs {
		lowest = min(lowest, cost)
	}
	return lowest
}

var selectFields = []string{"selection_id", "model_name", "routing_group", "block_size", "isl_tokens", "track_prefill_tokens"}

// compareSelect compares two choices and reports whether both name one rank.
func (p *parity) compareSelect(what string, query map[string]any, costs parityCosts, ours, theirs reply) (sameRank bool) {
	p.Helper()
	if ours.status != http.StatusOK || theirs.status != http.StatusOK {
		return true
	}
	p.same(what, query, ours.Result, theirs.Result, selectFields...)
	if overrides, _ := query["router_config_override"].(map[string]any); overrides["assume_kv_reuse"] == nil {
		p.same(what, query, ours.Result, theirs.Result, "sequence_hashes") // else they are random
	}
	a, b := place(ours.Result), place(theirs.Result)
	if query["pinned_worker"] == nil {
		if costs.ours[a] > least(costs.ours)+1e-9 {
			p.differ(what+" worker", query, a, fmt.Sprintf("ours cost %v", costs.ours))
		}
		if costs.theirs[b] > least(costs.theirs)+1e-9 {
			p.differ(what+" worker", query, fmt.Sprintf("theirs cost %v", costs.theirs), b)
		}
	}
	if a == b {
		p.same(what, query, ours.Result, theirs.Result, "endpoint", "overlap.longest_matched", "overlap.gpu", "overlap.dp", "overlap.cpu", "overlap.disk", "effective_prefill_tokens", "potential_decode_blocks")
		return true
	}
	switch overrides, _ := query["router_config_override"].(map[string]any); {
	case query["pinned_worker"] != nil:
		p.differ(what+" worker", query, a, b)
	case overrides["overlap_score_weight"] != nil:
		p.weighted++
	default:
		p.ties++
	}
	return false
}

func (p *parity) selectOnly() {
	query := p.selection()
	if p.random.IntN(12) == 0 {
		query["router_config_override"] = map[string]any{"router_temperature": 1.0}
		p.both("POST", "/select", query) // by chance: only that both answer
		return
	}
	costs := p.costs(query)
	ours, theirs := p.both("POST", "/select", query)
	p.compareSelect("POST /select", query, costs, ours, theirs)
}

func (p *parity) reserve() {
	query := p.selection()
	p.next++
	id := fmt.Sprintf("r%d", p.next)
	query["selection_id"] = id
	costs := p.costs(query)
	ours, theirs := p.both("POST", "/select_and_reserve", query)
	if theirs.status != http.StatusOK || ours.status != http.StatusOK {
		return
	}
	if !p.compareSelect("POST /select_and_reserve", query, costs, ours, theirs) {
		// Continue with the other's choice among the equals.
		ask(p, p.ours, "DELETE", "/reservations/"+id, nil)
		query["pinned_worker"] = map[string]any{"worker_id": theirs.Get("worker_id").Uint(), "dp_rank": theirs.Get("dp_rank").Uint()}
		ours = ask(p, p.ours, "POST", "/select_and_reserve", query)
		p.compareSelect("POST /select_and_reserve, pinned to the same", query, costs, ours, theirs)
	}
	p.reserved = append(p.reserved, id)
}

// book reserves on a named worker, or what a select before has chosen.
func (p *parity) book() {
	p.next++
	id := fmt.Sprintf("r%d", p.next)
	query := p.selection()
	query["selection_id"] = id
	delete(query, "allowed_worker_ids")
	key := p.ranks[p.random.IntN(len(p.ranks))].key
	if p.random.IntN(2) == 0 {
		query["pinned_worker"] = map[string]any{"worker_id": key.Worker, "dp_rank": key.Rank}
		ours, theirs := p.both("POST", "/select", query)
		p.compareSelect("POST /select", query, p.costs(query), ours, theirs)
		query = map[string]any{"model_name": parityModel, "selection_id": id}
	} else {
		delete(query, "pinned_worker")
		query["worker_id"], query["dp_rank"] = key.Worker, key.Rank
		if tokens := query["token_ids"].([]uint32); p.random.IntN(2) == 0 && len(tokens) > 0 {
			query["effective_prefill_tokens"] = p.random.IntN(len(tokens) + 1)
		}
	}
	ours, theirs := p.both("POST", "/reservations", query)
	if theirs.status == http.StatusCreated {
		p.same("POST /reservations", query, ours.Result, theirs.Result, "selection_id", "model_name", "routing_group", "worker_id", "dp_rank", "endpoint")
		p.reserved = append(p.reserved, id)
	}
}

// reservation picks one that is held, or now and then one that is not.
func (p *parity) reservation() string {
	if len(p.reserved) == 0 || p.random.IntN(20) == 0 {
		return fmt.Sprintf("r%d", 1+p.random.IntN(p.next+1))
	}
	return p.reserved[p.random.IntN(len(p.reserved))]
}

func (p *parity) step() {
	kinds := []struct {
		name   string
		weight int
		run    func()
	}{
		{"KV events", 22, p.events},
		{"select", 16, p.selectOnly},
		{"select_and_reserve", 20, p.reserve},
		{"reservations", 8, p.book},
		{"prefill_complete", 10, func() { p.both("POST", "/reservations/"+p.reservation()+"/prefill_complete", map[string]any{}) }},
		{"output_block", 8, func() {
			query := map[string]any{}
			if p.random.IntN(2) == 0 {
				// Eighths are exact, so that sums do not depend on their order; above 1 is
				// an error.
				query["decay_fraction"] = float64(p.random.IntN(10)) / 8
			}
			p.both("POST", "/reservations/"+p.reservation()+"/output_block", query)
		}},
		{"free", 14 + len(p.reserved)/4, func() {
			id := p.reservation()
			p.both("DELETE", "/reservations/"+id, nil)
			p.reserved = slices.DeleteFunc(p.reserved, func(have string) bool { return have == id })
		}},
		{"overlap_scores", 6, func() {
			query := map[string]any{"model_name": parityModel, "token_ids": p.prompt()}
			ours, theirs := p.both("POST", "/overlap_scores", query)
			p.same("POST /overlap_scores", query, ours.Result, theirs.Result, "block_size", "num_blocks")
			p.sameRows("POST /overlap_scores", query, ours.Get("workers"), theirs.Get("workers"), tierFields...)
		}},
		{"loads", 8, p.loads},
		{"dump", 1, p.dump},
		{"workers", 2, p.changeWorkers},
	}
	total := 0
	for _, k := range kinds {
		total += k.weight
	}
	draw := p.random.IntN(total)
	for _, k := range kinds {
		if draw -= k.weight; draw < 0 {
			p.operations[k.name]++
			k.run()
			p.loads() // every change of the books shows here
			return
		}
	}
}

func (p *parity) loads() {
	ours, theirs := p.both("GET", "/loads", nil)
	p.same("GET /loads", nil, ours.Result, theirs.Result, "#", "0.model_name", "0.routing_group", "0.pending_count", "0.pending_isl_tokens")
	p.sameRows("GET /loads", nil, ours.Get("0.loads"), theirs.Get("0.loads"), "potential_prefill_tokens", "potential_decode_blocks", "active_requests")
}

func (p *parity) dump() {
	ours, theirs := p.both("GET", "/dump", nil)
	if a, b := heldIn(ours.Result), heldIn(theirs.Result); !slices.Equal(a, b) {
		p.differ("GET /dump", nil, missing(a, b), missing(b, a))
	}
}

// changeWorkers adds, changes or removes a worker.
func (p *parity) changeWorkers() {
	switch id := p.ids[p.random.IntN(len(p.ids))]; {
	case len(p.ids) < 4:
		p.next++
		p.addWorker(uint64(p.next+100), p.random.IntN(2), 1+p.random.IntN(2))
	case p.random.IntN(3) == 0 && len(p.ids) > 3:
		p.removeWorker(id)
	default:
		path, query := fmt.Sprintf("/workers/%d", id), map[string]any{"total_kv_blocks": 500 + p.random.IntN(1000)}
		ours, theirs := p.both("PATCH", path, query)
		p.same("PATCH "+path, query, ours.Result, theirs.Result, workerFields...)
	}
}

// newParity starts both without workers.
func newParity(t *testing.T, seed uint64) *parity {
	theirs := dynamoService(t)
	site := Start(t, "--engine=none", "--policy=kv", fmt.Sprintf("--block-size=%d", parityBlockSize))
	return &parity{T: t, ours: site.Port, theirs: theirs, random: rand.New(rand.NewPCG(seed, seed)), operations: map[string]int{}, specs: map[uint64]map[string]any{}}
}

// addFour registers workers with one and two ranks.
func (p *parity) addFour() {
	p.addWorker(1, 0, 1)
	p.addWorker(2, 0, 1)
	p.addWorker(3, 0, 2)
	p.addWorker(4, 2, 2)
}

func TestSelectionParity(t *testing.T) {
	p := newParity(t, 1)
	p.addFour()
	for range parityOperations {
		p.step()
	}
	p.loads()
	p.dump()
	for _, id := range p.reserved {
		p.both("DELETE", "/reservations/"+id, nil)
	}
	p.loads()
	t.Logf("%d operations: %v", p.count(), p.operations)
	t.Logf("%d choices of another of several equally cheap ranks; %d that differ because only kvrouter applies the override overlap_score_weight", p.ties, p.weighted)
}

// Each service starts from the other's dump, and then finds the same.
func TestSelectionParityOfDumps(t *testing.T) {
	p := newParity(t, 3)
	p.addFour()
	for range 300 {
		p.events()
	}
	p.dump()
	second := Start(t, "--engine=none", "--policy=kv", "--block-size=4", "--indexer-peers="+p.theirs)
	origins := map[string]string{
		second.Port: p.theirs,
		dynamoService(t, "--indexer-peers", p.ours): p.ours,
	}
	for started, from := range origins {
		want := heldIn(ask(t, from, "GET", "/dump", nil).Result)
		var got []string
		testkit.Eventually(t, 20*time.Second, started+" has taken the dump of "+from, func() bool {
			got = heldIn(ask(t, started, "GET", "/dump", nil).Result)
			return len(got) == len(want)
		})
		if !slices.Equal(got, want) || len(want) < 100 {
			t.Errorf("%s started from %s: %s; %s", started, from, missing(got, want), missing(want, got))
		}
		for _, spec := range p.specs {
			if reply := ask(t, started, "POST", "/workers", spec); reply.status != http.StatusCreated {
				t.Errorf("%d %s", reply.status, reply.Raw)
			}
		}
		for range 100 {
			query := object{"model_name": parityModel, "token_ids": p.prompt()}
			a, b := ask(t, started, "POST", "/overlap_scores", query), ask(t, from, "POST", "/overlap_scores", query)
			p.sameRows("/overlap_scores after a start from a dump", query, a.Get("workers"), b.Get("workers"), "device_blocks")
		}
		t.Logf("%s holds the %d blocks of %s", started, len(got), from)
	}
}

// What differs, and why. Each case shows both answers, so that this list stays
// true.
func TestSelectionParityDifferences(t *testing.T) {
	p := newParity(t, 2)
	p.addWorker(1, 0, 1)
	r := p.ranks[0]
	prompt := testkit.Tokens(1, 12)
	blocks := func(from, to int) mocker.Event {
		event := mocker.Event{Tokens: prompt[4*from : 4*to]}
		if from > 0 {
			event.Parent, event.HasParent = uint64(10+from), true
		}
		for i := from; i < to; i++ {
			event.Stored = append(event.Stored, kv.StoredBlock{Engine: uint64(11 + i)})
		}
		return event
	}
	heldOf := func(base string, more object) string {
		return ask(t, base, "POST", "/overlap_scores", prompt12(more)).Get("workers.0.device_blocks").Raw
	}
	held := func(base string) string { return heldOf(base, nil) }
	call := func(method, path string, query any, field string) func(base string) string {
		return func(base string) string {
			answer := ask(t, base, method, path, query)
			return fmt.Sprint(answer.status, " ", answer.Get(field).String())
		}
	}
	for _, c := range []struct {
		name, why    string
		prepare      func()
		answer       func(base string) string
		ours, theirs string
	}{
		{
			"a block stored twice and removed once",
			"engines keep physical copies, and publish each of them: one is left",
			func() { p.publish(r, blocks(0, 1), blocks(0, 1), mocker.Event{Removed: []uint64{11}}) },
			held, "1", "0",
		}, {
			"a block of the middle removed and stored again",
			"the blocks behind it were never removed: the engine can use them again",
			func() {
				p.publish(r, mocker.Event{Cleared: true})
				p.publish(r, blocks(0, 3), mocker.Event{Removed: []uint64{12}}, blocks(1, 2))
			},
			held, "3", "2",
		}, {
			"no model_name",
			"means the default model here, which came first, and a model named default there",
			nil, call("POST", "/select", object{"token_ids": prompt}, "worker_id"), "200 1", "503 ",
		}, {
			"two ranks and one kv_events_endpoint",
			"vLLM gives the further ranks the following ports: taken as that here, incomplete there",
			nil, call("POST", "/workers", object{"worker_id": 8, "model_name": "n", "endpoint": "http://h:1", "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1", "data_parallel_size": 2}, "lifecycle"),
			"201 schedulable", "201 incomplete",
		}, {
			"an endpoint that is none",
			"an error here, an incomplete worker there",
			nil, call("POST", "/workers", object{"worker_id": 9, "model_name": "n", "endpoint": "http://h:1", "block_size": 4, "kv_events_endpoint": "x"}, "lifecycle"),
			"400 ", "201 incomplete",
		}, {
			"another block size of another model",
			"no difference: each model has its own",
			nil, call("POST", "/workers", object{"worker_id": 10, "model_name": "o", "endpoint": "http://h:1", "block_size": 8, "kv_events_endpoint": "tcp://127.0.0.1:1"}, "lifecycle"),
			"201 schedulable", "201 schedulable",
		}, {
			"another block size of another routing group",
			"no difference: each worker has its own here; each of a model's routing groups has one there",
			nil, call("POST", "/workers", object{"worker_id": 11, "model_name": "m", "routing_group": "g", "endpoint": "http://h:1", "block_size": 8, "kv_events_endpoint": "tcp://127.0.0.1:1"}, "lifecycle"),
			"201 schedulable", "201 schedulable",
		}, {
			"a rank that the worker has not",
			"only the text differs",
			nil, call("POST", "/reservations", object{"model_name": "m", "selection_id": "q", "worker_id": 1, "dp_rank": 4, "token_ids": prompt}, "error"),
			"404 schedulable worker 1 (dp_rank 4) not found for model=m routing_group=default", "404 Worker WorkerWithDpRank { worker_id: 1, dp_rank: 4 } not found",
		}, {
			"a field of a wrong type",
			"only the text differs, as for a body that is no JSON",
			nil, call("POST", "/select", object{"model_name": "m", "token_ids": true}, "error"),
			"422 bad body: token_ids cannot be a JSON bool",
			"422 Failed to deserialize the JSON body into the target type: invalid type: boolean `true`, expected a sequence at line 1 column 35",
		}, {
			"a LoRA adapter's blocks",
			"no difference: they match prompts of that adapter only",
			func() {
				event := blocks(0, 3)
				event.Adapter = mocker.Adapter{Name: "l", Id: 1}
				p.publish(r, mocker.Event{Cleared: true}, event)
			},
			func(base string) string {
				return heldOf(base, object{"lora_name": "l"}) + " " + heldOf(base, nil)
			}, "3 0", "3 0",
		}, {
			"blocks with a cache salt",
			"vLLM publishes the salt with a prompt's first block: salted prompts alone match here; there the events' salt is passed over",
			func() {
				event := blocks(0, 3)
				event.Salt = "s"
				p.publish(r, mocker.Event{Cleared: true}, event)
			},
			func(base string) string {
				return heldOf(base, object{"cache_salt": "s"}) + " " + heldOf(base, nil)
			}, "3 0", "0 3",
		},
	} {
		if c.prepare != nil {
			c.prepare()
		}
		ours, theirs := c.answer(p.ours), c.answer(p.theirs)
		t.Logf("%s: %s | kvrouter %s | Dynamo %s", c.name, c.why, ours, theirs)
		if ours != c.ours || theirs != c.theirs {
			t.Errorf("%s: ours %q, theirs %q; listed are %q and %q", c.name, ours, theirs, c.ours, c.theirs)
		}
	}
}
