package workers

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/probe"
)

// sameModels reports whether two lists name the same models.
func sameModels(a, b probe.Models) bool {
	return slices.Equal(a.Names, b.Names) && slices.Equal(a.Adapters, b.Adapters)
}

// baseOf returns the names of the base model.
func baseOf(m probe.Models) []string {
	return slices.DeleteFunc(slices.Clone(m.Names), func(name string) bool { return slices.Contains(m.Adapters, name) })
}

// serves is the worker's report on its base model.
func (in *incarnation) serves(list probe.Models) kv.Served {
	s := kv.Served{Names: baseOf(list), Root: list.Root}
	if in.info != nil && in.info.ModelPath != "" { // its list has the name that clients use
		s.Root = in.info.ModelPath
	}
	return s
}

// lookAtModels requests a worker's models again: LoRA adapters come and go while it
// runs. If it does not answer, they stay as they were.
func (in *incarnation) lookAtModels() {
	in.modelsAt = time.Now()
	served, err := in.f.probe.Models(in.ctx, in.w.spec)
	if err == nil && served.SGLang && in.engine != kv.EngineSGLang && in.w.attached {
		// A router with no workers up when it was asked about itself.
		in.f.log.Info(fmt.Sprintf("%s: now an SGLang server: attaching it again", in.w), "url", in.w.spec.URL)
		in.gone, in.modelsAt = true, time.Time{} // the next successful health check asks again
		return
	}
	if err != nil || served.Names == nil || sameModels(served, in.served) {
		return
	}
	if base := baseOf(in.served); in.w.attached && !slices.ContainsFunc(base,
		func(name string) bool { return slices.Contains(served.Names, name) }) && len(baseOf(served)) > 0 {
		in.f.log.Info(fmt.Sprintf("%s: now serves another base model: attaching it again", in.w), "before", base, "models", served.Names)
		in.gone, in.modelsAt = true, time.Time{}
		return
	}
	in.served = served
	for i := range in.targets {
		in.targets[i].Models, in.targets[i].Adapters = served.Names, served.Adapters
	}
	in.f.update(in.w, func(s *Status) { s.Models = served.Names })
	in.f.log.Info(fmt.Sprintf("%s: its list of models has changed", in.w), "models", served.Names)
	in.announceAnew()
}

// LookForModels refreshes the lists of the workers' models, because a request names
// an unknown one. It returns when all ready workers have answered or timed out.
// Concurrent calls share one refresh, and at most one starts per second, so that
// unknown names cost little.
func (f *Fleet) LookForModels(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, f.timing.lookEvery+f.timing.lookLimit)
	defer cancel()
	haveLooked(ctx, f.lookers)
}

// haveLooked asks the receiver for a look at models, and waits for its end or that of
// ctx.
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

// lookForModels serves LookForModels until ctx is done: one look for all waiting
// calls, and then a pause.
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
		if !f.sleep(ctx, f.timing.lookEvery, nil) {
			return
		}
	}
}

// askForModels has every ready worker asked for its models, but for registered ones,
// whose registration names them.
func (f *Fleet) askForModels(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, f.timing.lookLimit)
	defer cancel()
	var asked sync.WaitGroup
	for _, w := range f.all() {
		if w.current().State == StateReady && !w.registered() {
			asked.Go(func() { haveLooked(ctx, w.look) })
		}
	}
	asked.Wait()
}
