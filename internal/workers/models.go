package workers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"kvrouter/internal/kv"
)

// modelList is what a worker serves.
type modelList struct {
	names    []string // nil: the worker does not tell, and may serve any
	adapters []string // those of names that are LoRA adapters: they have a parent
	root     string   // what the base model was loaded from; empty: the worker does not tell
	sglang   bool     // the list is an SGLang server's
}

func (l modelList) equal(other modelList) bool {
	return slices.Equal(l.names, other.names) && slices.Equal(l.adapters, other.adapters)
}

// base returns the names of the base model.
func (l modelList) base() []string {
	return slices.DeleteFunc(slices.Clone(l.names), func(name string) bool { return slices.Contains(l.adapters, name) })
}

// serves is what the worker says of its base model.
func (in *incarnation) serves(list modelList) kv.Served {
	s := kv.Served{Names: list.base(), Root: list.root, BlockSize: in.askBlockSize}
	if in.info != nil && in.info.ModelPath != "" { // its list has the name that clients use
		s.Root = in.info.ModelPath
	}
	return s
}

// askBlockSize asks the worker for the tokens in a block of its KV cache; 0: it does
// not tell, or nobody follows its events, so that any size will do. What failed may
// succeed the next time: a first worker's size is that of its model.
func (in *incarnation) askBlockSize() (tokens int, err error) {
	if !in.f.cfg.KVEvents {
		return 0, nil
	}
	if in.info != nil {
		if in.info.Events == nil && in.w.Spec.KVEvents == "" {
			return 0, nil
		}
		size := in.info.PageSize
		if in.info.Events != nil && in.info.Events.BlockSize > 0 {
			size = in.info.Events.BlockSize
		}
		return int(min(max(size, 0), maxBlockSize)), nil
	}
	families, err := in.f.reader(in.w).fetch(in.ctx, in.w.Spec.URL+"/metrics", []string{cacheName})
	if err != nil && !isThere(err) {
		if in.w.sizeInVain++; in.w.sizeInVain < mostPagesInVain {
			return 0, fmt.Errorf("its block size: %w", err)
		}
	}
	in.w.sizeInVain = 0
	if err != nil {
		in.f.log.Warn(fmt.Sprintf("%s: does not tell its block size: it is taken to be --block-size where it is the first of its model", in.w), "error", err)
		return 0, nil
	}
	return blockSizeOf(families), nil
}

// maxBlockSize bounds what a worker says of its block size, tokens: far more than one
// is.
const maxBlockSize = 1 << 16

// models asks a worker which models it serves. A server that does not tell (its
// key is not known, or it has no such path) serves an unknown one.
func (f *Fleet) models(ctx context.Context, at Attached) (served modelList, err error) {
	var list struct {
		Data []struct {
			ID     string  `json:"id"`
			Root   string  `json:"root"`
			Owner  string  `json:"owned_by"`
			Parent *string `json:"parent"`
		} `json:"data"`
	}
	err = f.get(ctx, at, "/v1/models", f.Timing.probeLimit, &list)
	var status *statusError
	if errors.As(err, &status) && status.status < 500 {
		return modelList{}, nil
	}
	if err != nil {
		return modelList{}, err
	}
	for _, model := range list.Data {
		served.names = append(served.names, model.ID)
		served.sglang = served.sglang || model.Owner == "sglang"
		if model.Parent != nil && *model.Parent != "" {
			served.adapters = append(served.adapters, model.ID)
		} else if served.root == "" {
			served.root = model.Root
		}
	}
	return served, nil
}

// lookAtModels asks a worker again what it serves: LoRA adapters come and go
// while it runs. What cannot be told now stays as it was.
func (in *incarnation) lookAtModels() {
	in.modelsAt = time.Now()
	served, err := in.f.models(in.ctx, in.w.Spec)
	if err == nil && served.sglang && in.engine != kv.EngineSGLang && in.w.attached {
		// A router whose workers were not up when it was asked what it is.
		in.f.log.Info(fmt.Sprintf("%s: serves models of SGLang now: it is followed anew", in.w), "url", in.w.Spec.URL)
		in.gone, in.modelsAt = true, time.Time{} // a good look at its health asks again
		return
	}
	if err != nil || served.names == nil || served.equal(in.served) {
		return
	}
	if base := in.served.base(); in.w.attached && !slices.ContainsFunc(base, func(name string) bool { return slices.Contains(served.names, name) }) && len(served.base()) > 0 {
		in.f.log.Info(fmt.Sprintf("%s: serves another base model now: it is followed anew", in.w), "before", base, "models", served.names)
		in.gone, in.modelsAt = true, time.Time{}
		return
	}
	in.served = served
	for i := range in.targets {
		in.targets[i].Models, in.targets[i].Adapters = served.names, served.adapters
	}
	in.f.update(in.w, func(s *Status) { s.Models = served.names })
	in.f.log.Info(fmt.Sprintf("%s: serves other models", in.w), "models", served.names)
	if in.up {
		clear(in.announced)
		in.markUp()
	}
}

// LookForModels makes sure that what is known of the workers' models is not
// older than this call, because a request names one that none is known to
// serve. It returns when all ready workers have been asked, or not answered in
// time; with others that call at the same time, it waits for its turn for at
// most about a second, so that names that nobody serves make little work.
func (f *Fleet) LookForModels(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, f.Timing.lookEvery+f.Timing.lookLimit)
	defer cancel()
	haveLooked(ctx, f.lookers)
}

// haveLooked asks whoever receives from there for a look at models, and waits
// for its end or that of ctx.
func haveLooked(ctx context.Context, there chan<- chan struct{}) {
	looked := make(chan struct{})
	select {
	case there <- looked:
	case <-ctx.Done():
		return
	}
	select {
	case <-looked:
	case <-ctx.Done():
	}
}

// lookForModels serves LookForModels until ctx is done: one look for all that
// wait, and then a pause.
func (f *Fleet) lookForModels(ctx context.Context) {
	for {
		var waiting []chan struct{}
		select {
		case <-ctx.Done():
			return
		case looked := <-f.lookers:
			waiting = append(waiting, looked)
		}
		for more := true; more; {
			select {
			case looked := <-f.lookers:
				waiting = append(waiting, looked)
			default:
				more = false
			}
		}
		f.askForModels(ctx)
		for _, looked := range waiting {
			close(looked)
		}
		if !f.sleep(ctx, f.Timing.lookEvery, nil) {
			return
		}
	}
}

// askForModels has every ready worker that was not registered asked for its
// models; of a registered one they are what its registration says.
func (f *Fleet) askForModels(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, f.Timing.lookLimit)
	defer cancel()
	var asked sync.WaitGroup
	for _, w := range f.Members() {
		w.mu.Lock()
		ready := w.status.State == StateReady
		w.mu.Unlock()
		if !ready || w.registry != nil {
			continue
		}
		asked.Go(func() { haveLooked(ctx, w.look) })
	}
	asked.Wait()
}
