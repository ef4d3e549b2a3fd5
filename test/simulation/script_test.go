package simulation

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
)

// setup is the part of a world that a seed determines before the script: size and kinds of
// faults. Few worlds have all kinds, so that each occurs alone and combined with others.
type setup struct {
	Routers, Workers int
	Policy           string
	Peers            bool   // routers ask each other for missed events
	Blocks           int    // of each worker's cache
	Keep             []int  // batches in each worker's replay buffer
	Replay           []bool // whether a worker has one
	Delay            time.Duration
	Spike            float64
	Losses           losses
	Long             time.Duration // of the part with faults
	Requests         int
	Troubles         map[string]int // number of each kind

	Kind          kv.Kind   // of the workers' KV connector; none: they serve requests alone
	Roles         []kv.Role // of each worker; none: they serve requests alone
	LeastUncached int       // prompt tokens for which a prefill worker is used
	Enforce       bool      // no request goes to one worker alone
	Sessions      int       // that requests name; 0: none do
	SessionTTL    time.Duration
	SessionLimit  int
	Snapshot      time.Duration // between two writes of each router's snapshot; 0: there is none
	Fair          bool          // requests wait in a fair queue while all workers are full
}

// role returns worker i's part in disaggregated serving.
func (s *setup) role(i int) kv.Disagg {
	if s.Kind == kv.KindNone {
		return kv.Disagg{}
	}
	d := kv.Disagg{Role: s.Roles[i], Kind: s.Kind}
	switch {
	case d.Role == kv.RoleBoth && d.Kind != kv.KindNIXL: // it is not disaggregated
		d.Kind = kv.KindNone
	case d.Role == kv.RolePrefill && d.Kind != kv.KindNIXL:
		d.Bootstrap = kv.Bootstrap{Host: workerHost(i), Port: transferPort}
	}
	return d
}

// step is one action of a script.
type step struct {
	At   time.Duration // since the beginning
	What string
	A, B string        // hosts
	N, M int           // prompt and tokens of the answer
	D    time.Duration // until the client leaves; 0: it stays
	S    int           // its session; 0: none
	File fileFault     // of the snapshot of a router that crashes
}

// String returns the step as it is printed.
func (s step) String() string {
	text := fmt.Sprintf("%12s %s", s.At, s.What)
	for _, host := range []string{s.A, s.B} {
		if host != "" {
			text += " " + host
		}
	}
	if s.What == doRequest || s.What == doStream {
		text += fmt.Sprintf(" prompt %d tokens %d", s.N, s.M)
		if s.D > 0 {
			text += fmt.Sprintf(" leaves after %s", s.D)
		}
		if s.S > 0 {
			text += fmt.Sprintf(" session %d", s.S)
		}
	}
	if s.File != "" {
		text += fmt.Sprintf(", its snapshot is %s (%d)", s.File, s.M)
	}
	return text
}

// The actions.
const (
	doRequest   = "request"    // to router a
	doStream    = "stream"     // the same, with a stream
	doCrash     = "crash"      // worker or router a ends
	doStart     = "start"      // it starts again
	doLook      = "look"       // router a checks worker b
	doRepublish = "republish"  // worker a's publisher restarts
	doReset     = "reset"      // worker a empties its prefix cache
	doCut       = "cut"        // a and b are partitioned
	doMend      = "mend"       // the partition ends
	doBreak     = "break"      // the connections between a and b are reset
	doVanish    = "vanish"     // the connections between a and b go silent
	doServe     = "set-serves" // worker a's modes
	doFail      = "set-fails"
	doPress     = "set-presses"
	doBroken    = "set-breaks"
	doHang      = "set-hangs"
)

// The kinds of trouble that are a crash and a start.
const troubleWorker, troubleRouter = "worker", "router"

// trouble reports whether the step is a fault: not a request, nor the end of a fault.
func (s step) trouble() bool {
	switch s.What {
	case doRequest, doStream, doStart, doLook, doMend, doServe:
		return false
	}
	return true
}

// troubles are the kinds of trouble: a worker or a router that crashes, or an action.
var troubles = []string{troubleWorker, troubleRouter, doRepublish, doReset, doCut, doBreak, doVanish, doFail, doPress, doBroken, doHang}

// newSetup draws a world.
func newSetup(random *rand.Rand) setup {
	one := func(share float64) bool { return random.Float64() < share }
	up := func(most float64) float64 { // 0 in half of the worlds
		if one(0.5) {
			return 0
		}
		return random.Float64() * most
	}
	s := setup{
		Routers: 1 + random.IntN(3), Workers: 1 + random.IntN(3), Policy: []string{"work", "kv", "round-robin", "least-loaded"}[random.IntN(4)],
		Peers: one(0.5), Blocks: 16 + random.IntN(26), Delay: time.Duration(1+random.IntN(20)) * time.Millisecond, Spike: up(0.05),
		Losses: losses{Drop: up(0.1), Twice: up(0.1), Swap: up(0.1)}, Long: time.Duration(4+random.IntN(16)) * time.Second, Requests: 8 + random.IntN(25), Troubles: map[string]int{},
	}
	for range s.Workers {
		keep := 1000
		if one(0.2) {
			keep = 2 + random.IntN(10)
		}
		s.Keep, s.Replay = append(s.Keep, keep), append(s.Replay, one(0.8))
	}
	for _, trouble := range troubles {
		if one(0.4) {
			s.Troubles[trouble] = 1 + random.IntN(3)
		}
	}
	if one(0.35) {
		s.pairUp(random)
	}
	if one(0.4) {
		s.Sessions, s.SessionTTL, s.SessionLimit = 1+random.IntN(3), time.Duration(12+random.IntN(28))*time.Second, 1000
		if one(0.1) {
			s.SessionLimit = 1
		}
	}
	if one(0.3) {
		s.Snapshot = time.Duration(100+random.IntN(4000)) * time.Millisecond
		s.Troubles[troubleRouter] = max(1, s.Troubles[troubleRouter])
	}
	return s
}

// pairUp gives the workers roles: a prefill and a decode worker at least.
func (s *setup) pairUp(random *rand.Rand) {
	s.Kind = []kv.Kind{kv.KindNIXL, kv.KindSGLang, kv.KindMooncake}[random.IntN(3)]
	if s.Enforce = random.Float64() < 0.15; !s.Enforce { // a short prompt is not shared even then
		s.LeastUncached = random.IntN(3) * blockSize
	}
	for s.Workers < 2+random.IntN(3) {
		s.Workers++
		s.Keep, s.Replay = append(s.Keep, 1000), append(s.Replay, random.Float64() < 0.8)
	}
	s.Roles = []kv.Role{kv.RolePrefill, kv.RoleDecode}
	for len(s.Roles) < s.Workers {
		s.Roles = append(s.Roles, []kv.Role{kv.RoleBoth, kv.RolePrefill, kv.RoleDecode}[random.IntN(3)])
	}
}

// rush makes so many requests fail within so short a time that the retry budget is used up.
func (s *setup) rush(random *rand.Rand) {
	s.Requests, s.Long = 60+random.IntN(60), time.Duration(4+random.IntN(5))*time.Second
	s.Troubles[doFail] = 3 + random.IntN(4)
}

// workerHost names a worker's host.
func workerHost(i int) string { return fmt.Sprintf("w%d", i) }

// newScript draws the steps of a world, by time.
func newScript(s *setup, random *rand.Rand) (script []step) {
	at := func(most time.Duration) time.Duration { return time.Duration(random.Int64N(int64(most))) }
	router := func() string { return hostOf(random.IntN(s.Routers)) }
	worker := func() string { return workerHost(random.IntN(s.Workers)) }
	host := func() string {
		n := random.IntN(s.Routers + s.Workers)
		if n < s.Routers {
			return hostOf(n)
		}
		return workerHost(n - s.Routers)
	}
	add := func(s step) { script = append(script, s) }
	for range s.Requests {
		next := step{At: at(s.Long), What: []string{doRequest, doStream}[random.IntN(2)], A: router(), N: random.IntN(prompts), M: 1 + random.IntN(answer)}
		if random.Float64() < 0.2 {
			next.D = at(500 * time.Millisecond)
		}
		if s.Sessions > 0 && random.Float64() < 0.7 {
			next.S = 1 + random.IntN(s.Sessions)
		}
		add(next)
	}
	for _, trouble := range troubles {
		for range s.Troubles[trouble] {
			begin, long := at(s.Long), at(s.Long/2)
			a, b := worker(), router()
			switch trouble {
			case troubleWorker:
				add(step{At: begin, What: doCrash, A: a})
				add(step{At: begin + long, What: doStart, A: a})
				for range 3 {
					add(step{At: begin + at(2*long+time.Second), What: doLook, A: router(), B: a})
				}
			case troubleRouter:
				crash := step{At: begin, What: doCrash, A: b}
				if s.Snapshot > 0 {
					crash.File, crash.M = fileFaults[random.IntN(len(fileFaults))], random.IntN(1000)
				}
				add(crash)
				add(step{At: begin + long, What: doStart, A: b})
			case doCut, doBreak, doVanish:
				if random.Float64() < 0.3 {
					a = host()
				}
				if a == b {
					continue
				}
				add(step{At: begin, What: trouble, A: a, B: b})
				if trouble == doCut {
					add(step{At: begin + long, What: doMend, A: a, B: b})
				}
			case doRepublish, doReset:
				add(step{At: begin, What: trouble, A: a})
			default:
				add(step{At: begin, What: trouble, A: a})
				add(step{At: begin + long, What: doServe, A: a})
			}
		}
	}
	slices.SortFunc(script, func(a, b step) int { return cmp.Compare(a.At, b.At) })
	return script
}

// prompts is the number of different prompts of clients, answer the maximum tokens of an
// answer, and touches the number of prompts that make workers publish.
const prompts, answer, touches = 12, 9, 24

// newPrompts draws prompts, many with common prefixes. With its answer, each fits in a cache of that
// many blocks.
func newPrompts(random *rand.Rand, blocks int) (list []*prompt) {
	for i := range prompts + touches {
		p := &prompt{}
		if i < prompts && i > 0 && random.Float64() < 0.7 {
			before := list[random.IntN(i)]
			p.tokens = slices.Clone(before.tokens[:random.IntN(before.length/blockSize+1)*blockSize])
		}
		more := blockSize + 1
		if i < prompts {
			more = 1 + random.IntN(5*blockSize)
		}
		for range more {
			p.tokens = append(p.tokens, random.Uint32())
		}
		p.length = min(len(p.tokens), blocks*blockSize-answer)
		p.tokens = p.tokens[:p.length]
		for range answer {
			p.tokens = append(p.tokens, random.Uint32())
		}
		p.local = kv.HashBlocks(nil, p.tokens[:p.length], blockSize, "", "")
		all := kv.HashBlocks(nil, p.tokens, blockSize, "", "")
		for at, engine := range kv.SequenceHashes(nil, all) {
			p.blocks = append(p.blocks, kv.StoredBlock{Engine: engine, Local: all[at]})
		}
		list = append(list, p)
	}
	return list
}

// scenario is all that a simulation depends on.
type scenario struct {
	Seed  uint64
	Setup setup
	steps []step
}

// newScenario draws the scenario of a seed.
func newScenario(seed uint64) *scenario {
	random := rand.New(rand.NewPCG(seed, 0))
	s := &scenario{Seed: seed, Setup: newSetup(random)}
	if other := rand.New(rand.NewPCG(seed, 3)); other.Float64() < 0.03 {
		s.Setup.rush(other)
	}
	// A session leaves a worker that is full.
	s.Setup.Fair = s.Setup.Sessions == 0 && rand.New(rand.NewPCG(seed, 4)).Float64() < 0.3
	s.steps = newScript(&s.Setup, random)
	return s
}

// String returns the scenario as text, step by step.
func (s *scenario) String() string {
	out := &strings.Builder{}
	fmt.Fprintf(out, "seed %d, %+v\n", s.Seed, s.Setup)
	for _, step := range s.steps {
		fmt.Fprintln(out, step)
	}
	return out.String()
}

// save writes the scenario to a file: one line with its setup, one a step.
func (s *scenario) save(file string) error {
	out := &bytes.Buffer{}
	encoder := json.NewEncoder(out)
	err := encoder.Encode(s)
	for _, step := range s.steps {
		err = errors.Join(err, encoder.Encode(step))
	}
	return errors.Join(err, os.WriteFile(file, out.Bytes(), 0o600))
}

// loadScenario reads a file of save.
func loadScenario(file string) (*scenario, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	s, decoder := &scenario{}, json.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(s); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for {
		var next step
		switch err := decoder.Decode(&next); {
		case errors.Is(err, io.EOF):
			return s, nil
		case err != nil:
			return nil, fmt.Errorf("%s: step %d: %w", file, len(s.steps), err)
		}
		s.steps = append(s.steps, next)
	}
}

// shrink removes the parts of a failing scenario that it does not need to fail.
func (s *scenario) shrink(fails func(*scenario) bool) *scenario {
	for size := (len(s.steps) + 1) / 2; size > 0; size /= 2 {
		for at := 0; at < len(s.steps); {
			less := *s
			less.steps = slices.Delete(slices.Clone(s.steps), at, min(at+size, len(s.steps)))
			if fails(&less) {
				s = &less
			} else {
				at += size
			}
		}
	}
	return s
}
