package thompson

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/textfile"
	"kvrouter/internal/decide/policy"
)

const (
	stateFormat  = "kvrouter thompson state"
	stateVersion = 1
	// stateInterval is the least time between two writes.
	stateInterval = 10 * time.Second
	// maxStateSize bounds the file, bytes.
	maxStateSize = 64 << 20
	// maxEvidence bounds a plausible sum of the bandits:
	// it grows by at most 1 a feedback, that of latencies is in ms.
	maxEvidence = 1e15
)

// savedState is the file of --thompson-state. Its numbers are as of when it
// was written.
type savedState struct {
	Format    string          `json:"format"`
	Version   int             `json:"version"`
	Fixes     string          `json:"fixes"`  // under which it was learned
	Lambda    float64         `json:"lambda"` // of the prior
	Workers   []savedArm      `json:"workers"`
	Baselines []savedBaseline `json:"baselines"`
	Series    []savedSeries   `json:"series"` // touched longest ago first
}

type savedArm struct {
	Worker uint64       `json:"worker"`
	Rank   uint32       `json:"rank,omitempty"`
	Alpha  float64      `json:"alpha"`
	Beta   float64      `json:"beta"`
	A      [][]float64  `json:"a"` // rows of the upper half, from the diagonal on
	B      banditVector `json:"b"`
}

type savedBaseline struct {
	Worker *uint64     `json:"worker,omitempty"` // none: of all
	Rank   uint32      `json:"rank,omitempty"`
	Kind   latencyKind `json:"kind"`
	A      uint8       `json:"a,omitempty"`
	B      uint8       `json:"b,omitempty"`
	MS     float64     `json:"ms"`
}

type savedSeries struct {
	ID        string    `json:"id"`
	Total     int       `json:"total"`
	Processed int       `json:"processed"`
	Touched   time.Time `json:"touched"`
	Worker    *uint64   `json:"worker,omitempty"` // that it is pinned to; none: it is not
	Rank      uint32    `json:"rank,omitempty"`
	Reuse     int       `json:"reuse,omitempty"`
	Decode    float64   `json:"decode_cost,omitempty"`
	Prefill   float64   `json:"prefill_cost,omitempty"`
	IAT       float64   `json:"iat_factor,omitempty"`
}

// state is what goes into a file, a copy. Call it under the router's lock.
func (p *Policy) state() *savedState {
	state := &savedState{
		Format: stateFormat, Version: stateVersion, Fixes: p.fixes.String(), Lambda: p.lambda,
		Workers: make([]savedArm, 0, p.workers.len()), Series: make([]savedSeries, 0, p.series.len()),
	}
	for key, w := range p.workers.all {
		p.fade(w)
		worker := savedArm{Worker: key.Worker, Rank: key.Rank, Alpha: w.mean.alpha, Beta: w.mean.beta, A: make([][]float64, banditDim), B: w.linear.b}
		a := slices.Clone(w.linear.a[:])
		for i := range worker.A {
			worker.A[i] = a[i*banditDim+i : (i+1)*banditDim]
		}
		state.Workers = append(state.Workers, worker)
	}
	for key, ms := range p.baselines {
		baseline := savedBaseline{Rank: key.worker.Rank, Kind: key.kind, A: key.a, B: key.b, MS: ms}
		if key.perWorker {
			baseline.Worker = &key.worker.Worker
		}
		state.Baselines = append(state.Baselines, baseline)
	}
	pinned := make([]uint64, 0, p.series.len()) // that the series point into: one allocation
	for id, series := range p.series.all {
		one := savedSeries{ID: id, Total: series.total, Processed: series.processed, Touched: series.touched}
		if pin := &series.pin; series.pinned {
			pinned = append(pinned, pin.worker.Worker)
			one.Worker, one.Rank = &pinned[len(pinned)-1], pin.worker.Rank
			one.Reuse, one.Decode, one.Prefill, one.IAT = pin.reuse, pin.decode, pin.prefill, pin.iat
		}
		state.Series = append(state.Series, one)
	}
	return state
}

// decodeState reads a state file and checks every number in it.
func decodeState(data []byte) (*savedState, error) {
	var s savedState
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	var head struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil || head.Format != stateFormat {
		return nil, errors.New("not a state file of policy thompson, or corrupt")
	}
	if head.Version != stateVersion {
		return nil, fmt.Errorf("unsupported version %d, expected %d", head.Version, stateVersion)
	}
	if err := decoder.Decode(&s); err != nil {
		return nil, fmt.Errorf("corrupt: %w", err)
	}
	if len(s.Workers) > maxWorkers || len(s.Series) > maxSeries {
		return nil, fmt.Errorf("%d workers and %d series exceed the limits", len(s.Workers), len(s.Series))
	}
	workers, ids := map[kv.WorkerKey]bool{}, map[string]bool{}
	for _, w := range s.Workers {
		key := kv.WorkerKey{Worker: w.Worker, Rank: w.Rank}
		err := w.check()
		if workers[key] {
			err = errors.New("duplicate entry")
		}
		if err != nil {
			return nil, fmt.Errorf("corrupt: worker %d: %w", w.Worker, err)
		}
		workers[key] = true
	}
	for _, u := range s.Baselines {
		if !(u.MS >= 0) || u.MS > maxEvidence {
			return nil, fmt.Errorf("corrupt: a baseline of %v ms", u.MS)
		}
	}
	for _, series := range s.Series {
		reasonable := func(v float64) bool { return v >= 0 && v <= maxEvidence }
		if series.ID == "" || series.Total < 0 || series.Processed < 0 || series.Reuse < 0 || !reasonable(series.Decode) || !reasonable(series.Prefill) || !reasonable(series.IAT) {
			return nil, fmt.Errorf("corrupt: series %q", series.ID)
		}
		if ids[series.ID] {
			return nil, fmt.Errorf("corrupt: series %q is duplicated", series.ID)
		}
		ids[series.ID] = true
	}
	return &s, nil
}

func (w *savedArm) check() error {
	if !(w.Alpha > 0 && w.Beta > 0 && w.Alpha < maxEvidence && w.Beta < maxEvidence) {
		return fmt.Errorf("alpha %v and beta %v", w.Alpha, w.Beta)
	}
	if len(w.A) != banditDim {
		return fmt.Errorf("%d rows of a, not %d", len(w.A), banditDim)
	}
	for i, row := range w.A {
		if len(row) != banditDim-i {
			return fmt.Errorf("row %d of a has %d numbers, not %d", i, len(row), banditDim-i)
		}
		if !(row[0] > 0) || slices.ContainsFunc(row, beyondEvidence) {
			return fmt.Errorf("row %d of a", i)
		}
	}
	if slices.ContainsFunc(w.B[:], beyondEvidence) {
		return errors.New("b")
	}
	return nil
}

func beyondEvidence(v float64) bool { return !(math.Abs(v) <= maxEvidence) }

// restore takes over a state before the first decision. Evidence under
// other fixes or with another prior means something else, so it is refused.
func (p *Policy) restore(s *savedState) error {
	if fixes := p.fixes.String(); s.Fixes != fixes {
		return fmt.Errorf("learned with fixes %s, not %s", s.Fixes, fixes)
	}
	if s.Lambda != p.lambda {
		return fmt.Errorf("learned with lints.lambda %v, not %v", s.Lambda, p.lambda)
	}
	for _, state := range s.Workers {
		w := p.newWorker(kv.WorkerKey{Worker: state.Worker, Rank: state.Rank})
		w.mean, w.linear.b = betaBandit{state.Alpha, state.Beta}, state.B
		for i, row := range state.A {
			copy(w.linear.a[i*banditDim+i:], row)
		}
	}
	for _, state := range s.Baselines {
		key := latencyKey{kind: state.Kind, a: state.A, b: state.B}
		if state.Worker != nil {
			key.perWorker, key.worker = true, kv.WorkerKey{Worker: *state.Worker, Rank: state.Rank}
		}
		p.baselines[key] = state.MS
	}
	for _, state := range s.Series {
		series := &requestSeries{id: state.ID, total: state.Total, processed: state.Processed, touched: state.Touched}
		p.series.put(series.id, series)
		if state.Worker == nil {
			continue
		}
		series.pin = seriesPin{worker: kv.WorkerKey{Worker: *state.Worker, Rank: state.Rank}, reuse: state.Reuse, decode: state.Decode, prefill: state.Prefill, iat: state.IAT}
		if w := p.workers.get(series.pin.worker); w != nil {
			p.pin(series, w)
		}
	}
	return nil
}

// StateFile saves a policy's state to a file.
type StateFile struct {
	name  string
	with  func(func(policy.Policy)) // see With
	log   *slog.Logger
	saved uint64 // changes that the file has

	every    time.Duration // between two writes
	failures atomic.Uint64 // failed writes
}

// Failures returns the number of failed writes; 0 for nil.
func (f *StateFile) Failures() uint64 {
	if f == nil {
		return 0
	}
	return f.failures.Load()
}

// OpenState restores the policy from the file, if there is one. with is the
// parameter of With.
func OpenState(name string, with func(func(policy.Policy)), log *slog.Logger) (*StateFile, error) {
	file := &StateFile{name: name, with: with, log: log, every: stateInterval}
	data, err := textfile.Read(name, maxStateSize)
	if errors.Is(err, fs.ErrNotExist) {
		return file, file.write(true) // an error that would come later
	}
	var state *savedState
	if err == nil {
		state, err = decodeState(data)
	}
	if err == nil {
		With(with, func(p *Policy) { err = p.restore(state) })
	}
	if err != nil {
		return nil, fmt.Errorf("--thompson-state %s: %w; remove the file to start over", name, err)
	}
	return file, nil
}

// Run writes the state every stateInterval until ctx ends, and once more then. Of
// failures in a row the first is logged.
func (f *StateFile) Run(ctx context.Context) {
	ticker := time.NewTicker(f.every)
	defer ticker.Stop()
	failing := false
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case <-ticker.C:
		}
		switch err := f.write(false); {
		case err != nil:
			f.failures.Add(1)
			if !failing {
				f.log.Error("failed to save the state of policy thompson: the file is unchanged", "error", err)
			}
			failing = true
		case failing:
			f.log.Info("the state of policy thompson is saved again", "file", f.name)
			failing = false
		}
	}
}

// write replaces the file by the present state, if that has changed or always.
// A concurrent reader finds the old file or the new one, whole.
func (f *StateFile) write(always bool) error {
	var state *savedState
	changes := f.saved
	With(f.with, func(p *Policy) {
		if changes = p.changes; always || changes != f.saved {
			state = p.state()
		}
	})
	if state == nil {
		return nil
	}
	data, err := json.Marshal(state)
	if err == nil {
		err = replaceFile(f.name, data)
	}
	if err != nil {
		return fmt.Errorf("--thompson-state %s: %w", f.name, err)
	}
	f.saved = changes
	return nil
}

// replaceFile writes a file in one step.
func replaceFile(name string, data []byte) error {
	file, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name()) // no longer there if all went well
	_, err = file.Write(data)
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), name)
}
