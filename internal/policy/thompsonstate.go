package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"kvrouter/internal/kv"
)

const (
	thompsonStateFormat  = "kvrouter thompson state"
	thompsonStateVersion = 1
	// thompsonStateEvery is the least time between two writes.
	thompsonStateEvery = 10 * time.Second
	// maxThompsonState bounds the file, bytes.
	maxThompsonState = 64 << 20
	// maxThompsonEvidence bounds what a sum of the bandits can honestly come to:
	// it grows by at most 1 a feedback, that of latencies is in ms.
	maxThompsonEvidence = 1e15
)

// thompsonState is the file of --thompson-state. Its numbers are as of when it
// was written.
type thompsonState struct {
	Format  string                `json:"format"`
	Version int                   `json:"version"`
	Fixes   string                `json:"fixes"`  // under which it was learned
	Lambda  float64               `json:"lambda"` // of the prior
	Workers []thompsonWorkerState `json:"workers"`
	Usual   []thompsonUsualState  `json:"baselines"`
	Series  []thompsonSeriesState `json:"series"` // touched longest ago first
}

type thompsonWorkerState struct {
	Worker uint64       `json:"worker"`
	Rank   uint32       `json:"rank,omitempty"`
	Alpha  float64      `json:"alpha"`
	Beta   float64      `json:"beta"`
	A      [][]float64  `json:"a"` // rows of the upper half, from the diagonal on
	B      banditVector `json:"b"`
}

type thompsonUsualState struct {
	Worker *uint64     `json:"worker,omitempty"` // none: of all
	Rank   uint32      `json:"rank,omitempty"`
	Kind   latencyKind `json:"kind"`
	A      uint8       `json:"a,omitempty"`
	B      uint8       `json:"b,omitempty"`
	MS     float64     `json:"ms"`
}

type thompsonSeriesState struct {
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

// thompsonSnapshot is a copy of what a state file holds, taken quickly.
type thompsonSnapshot struct {
	fixes   thompsonFixes
	lambda  float64
	workers []thompsonLearned
	usual   map[latencyKey]float64
	series  []thompsonSeries
}

// thompsonLearned is what is known of a worker.
type thompsonLearned struct {
	worker kv.WorkerKey
	mean   betaBandit
	a      banditMatrix
	b      banditVector
}

// snapshot copies what a state file holds. Call it under the router's lock.
func (p *Thompson) snapshot() *thompsonSnapshot {
	s := &thompsonSnapshot{
		fixes: p.Fixes, lambda: p.lambda, usual: maps.Clone(p.usual),
		workers: make([]thompsonLearned, 0, p.workers.len()), series: make([]thompsonSeries, 0, p.series.len()),
	}
	for key, w := range p.workers.all {
		p.fade(w)
		s.workers = append(s.workers, thompsonLearned{worker: key, mean: w.mean, a: w.linear.a, b: w.linear.b})
	}
	for _, series := range p.series.all {
		s.series = append(s.series, *series)
	}
	return s
}

// state is what goes into a file.
func (s *thompsonSnapshot) state() *thompsonState {
	state := &thompsonState{Format: thompsonStateFormat, Version: thompsonStateVersion, Fixes: s.fixes.String(), Lambda: s.lambda}
	for _, w := range s.workers {
		worker := thompsonWorkerState{Worker: w.worker.Worker, Rank: w.worker.Rank, Alpha: w.mean.alpha, Beta: w.mean.beta, B: w.b}
		for i := range banditDim {
			worker.A = append(worker.A, slices.Clone(w.a[i*banditDim+i:(i+1)*banditDim]))
		}
		state.Workers = append(state.Workers, worker)
	}
	for key, ms := range s.usual {
		usual := thompsonUsualState{Rank: key.worker.Rank, Kind: key.kind, A: key.a, B: key.b, MS: ms}
		if key.perWorker {
			usual.Worker = &key.worker.Worker
		}
		state.Usual = append(state.Usual, usual)
	}
	for i := range s.series {
		series, pin := &s.series[i], &s.series[i].pin
		one := thompsonSeriesState{ID: series.id, Total: series.total, Processed: series.processed, Touched: series.touched}
		if series.pinned {
			one.Worker, one.Rank = &pin.worker.Worker, pin.worker.Rank
			one.Reuse, one.Decode, one.Prefill, one.IAT = pin.reuse, pin.decode, pin.prefill, pin.iat
		}
		state.Series = append(state.Series, one)
	}
	return state
}

// decodeThompsonState reads a state file and checks every number in it.
func decodeThompsonState(data []byte) (*thompsonState, error) {
	var s thompsonState
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	var head struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil || head.Format != thompsonStateFormat {
		return nil, errors.New("it is not a state file of policy thompson, or broken")
	}
	if head.Version != thompsonStateVersion {
		return nil, fmt.Errorf("it has version %d, and this program reads version %d", head.Version, thompsonStateVersion)
	}
	if err := decoder.Decode(&s); err != nil {
		return nil, fmt.Errorf("it is broken: %w", err)
	}
	if len(s.Workers) > maxThompsonWorkers || len(s.Series) > maxThompsonSeries {
		return nil, fmt.Errorf("it has %d workers and %d series, more than any router remembers", len(s.Workers), len(s.Series))
	}
	workers, ids := map[kv.WorkerKey]bool{}, map[string]bool{}
	for _, w := range s.Workers {
		key := kv.WorkerKey{Worker: w.Worker, Rank: w.Rank}
		err := w.check()
		if workers[key] {
			err = errors.New("it is there twice")
		}
		if err != nil {
			return nil, fmt.Errorf("it is broken: worker %d: %w", w.Worker, err)
		}
		workers[key] = true
	}
	for _, u := range s.Usual {
		if !(u.MS >= 0) || u.MS > maxThompsonEvidence {
			return nil, fmt.Errorf("it is broken: a baseline of %v ms", u.MS)
		}
	}
	for _, series := range s.Series {
		reasonable := func(v float64) bool { return v >= 0 && v <= maxThompsonEvidence }
		if series.ID == "" || series.Total < 0 || series.Processed < 0 || series.Reuse < 0 || !reasonable(series.Decode) || !reasonable(series.Prefill) || !reasonable(series.IAT) {
			return nil, fmt.Errorf("it is broken: series %q", series.ID)
		}
		if ids[series.ID] {
			return nil, fmt.Errorf("it is broken: series %q is there twice", series.ID)
		}
		ids[series.ID] = true
	}
	return &s, nil
}

func (w *thompsonWorkerState) check() error {
	if !(w.Alpha > 0 && w.Beta > 0 && w.Alpha < maxThompsonEvidence && w.Beta < maxThompsonEvidence) {
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

func beyondEvidence(v float64) bool { return !(math.Abs(v) <= maxThompsonEvidence) }

// restore takes over a state before the first decision. What was learned under
// other fixes or with another prior means something else, so it is refused.
func (p *Thompson) restore(s *thompsonState) error {
	if fixes := p.Fixes.String(); s.Fixes != fixes {
		return fmt.Errorf("it was learned with --thompson.fixes %s, not %s", s.Fixes, fixes)
	}
	if s.Lambda != p.lambda {
		return fmt.Errorf("it was learned with lints.lambda %v, not %v", s.Lambda, p.lambda)
	}
	for _, state := range s.Workers {
		w := p.newWorker(kv.WorkerKey{Worker: state.Worker, Rank: state.Rank})
		w.mean, w.linear.b = betaBandit{state.Alpha, state.Beta}, state.B
		for i, row := range state.A {
			copy(w.linear.a[i*banditDim+i:], row)
		}
	}
	for _, state := range s.Usual {
		key := latencyKey{kind: state.Kind, a: state.A, b: state.B}
		if state.Worker != nil {
			key.perWorker, key.worker = true, kv.WorkerKey{Worker: *state.Worker, Rank: state.Rank}
		}
		p.usual[key] = state.MS
	}
	for _, state := range s.Series {
		series := &thompsonSeries{id: state.ID, total: state.Total, processed: state.Processed, touched: state.Touched}
		p.series.put(series.id, series)
		if state.Worker == nil {
			continue
		}
		series.pin = thompsonPin{worker: kv.WorkerKey{Worker: *state.Worker, Rank: state.Rank}, reuse: state.Reuse, decode: state.Decode, prefill: state.Prefill, iat: state.IAT}
		if w := p.workers.get(series.pin.worker); w != nil {
			p.pin(series, w)
		}
	}
	return nil
}

// ThompsonStateFile keeps a policy's state in a file.
type ThompsonStateFile struct {
	name  string
	with  func(func(*Thompson)) bool // runs a function with the policy, under its router's lock
	saved uint64                     // changes that the file has
}

// OpenThompsonState fills the policy from the file, if there is one. with runs a
// function with the policy, under its router's lock.
func OpenThompsonState(name string, with func(func(*Thompson)) bool) (*ThompsonStateFile, error) {
	file := &ThompsonStateFile{name: name, with: with}
	data, err := readAtMost(name, maxThompsonState)
	if errors.Is(err, fs.ErrNotExist) {
		return file, file.write(true) // an error that would come later
	}
	var state *thompsonState
	if err == nil {
		state, err = decodeThompsonState(data)
	}
	if err == nil {
		with(func(p *Thompson) { err = p.restore(state) })
	}
	if err != nil {
		return nil, fmt.Errorf("--thompson-state %s: %w; move it away to learn anew", name, err)
	}
	return file, nil
}

func readAtMost(name string, limit int64) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if info.Size() > limit || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("it is no file of at most %d bytes", limit)
	}
	return os.ReadFile(name)
}

// Run writes the state every thompsonStateEvery until ctx ends, and once more then.
func (f *ThompsonStateFile) Run(ctx context.Context, log *slog.Logger) {
	ticker := time.NewTicker(thompsonStateEvery)
	defer ticker.Stop()
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case <-ticker.C:
		}
		if err := f.write(false); err != nil {
			log.Error("cannot keep what policy thompson has learned", "error", err)
		}
	}
}

// write replaces the file by the present state, if that has changed or always.
// Whoever reads the file meanwhile finds the old one or the new one, whole.
func (f *ThompsonStateFile) write(always bool) error {
	var snapshot *thompsonSnapshot
	changes := f.saved
	f.with(func(p *Thompson) {
		if changes = p.changes; always || changes != f.saved {
			snapshot = p.snapshot()
		}
	})
	if snapshot == nil {
		return nil
	}
	data, err := json.Marshal(snapshot.state())
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
