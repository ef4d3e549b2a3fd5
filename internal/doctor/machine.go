package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"kvrouter/internal/mocker"
	"kvrouter/internal/process"
	"kvrouter/internal/settings"
	"kvrouter/internal/tokens"
	"kvrouter/internal/web"
)

const (
	// modelLimit bounds the search for a model's tokenizer, which may be fetched.
	modelLimit = time.Minute
	// fewDescriptors are too few for a router that many clients use.
	fewDescriptors = 4096
)

// lookAtMachine looks at what the router needs here: its library, Python, the GPUs and
// the model.
func (c Command) lookAtMachine(ctx context.Context, s Setup, r *report) {
	if c.Unusable != nil {
		r.mend(c.Unusable.Error(), "")
	}
	if err := encodes(); err != nil {
		r.mend("the native library does not encode: "+err.Error(), "build it again: make setup")
	} else {
		r.ok("the native library encodes")
	}
	if n := web.Descriptors(); n < fewDescriptors {
		r.note(fmt.Sprintf("only %d files and connections may be open at once", n), "raise the hard limit: ulimit -Hn 65536, or LimitNOFILE= in the unit")
	}
	if s.Starts && c.Unusable == nil {
		lookAtEngine(s, r)
	}
	if model := s.Settings.Model; model != "" && c.Unusable == nil {
		lookAtModel(ctx, model, s.Settings.Python, r)
	} else if len(s.Workers) > 0 && model == "" {
		r.note("the router has no tokenizer: it asks the workers for the tokens of each prompt", "give --model the workers' model, a name or a folder")
	}
}

// encodes tries the native library.
func encodes() error {
	model, err := mocker.OpenBuiltinModel()
	if err != nil {
		return err
	}
	defer model.Close()
	const text = "kvrouter"
	if encoded := model.Encode(text, false); model.Decode(encoded) != text {
		return fmt.Errorf("%q comes back as %q", text, model.Decode(encoded))
	}
	return nil
}

// lookAtEngine looks at what starts workers.
func lookAtEngine(s Setup, r *report) {
	name := s.Engine.Signs.Engine
	if _, err := process.NewLauncher(s.Engine, s.Settings, silent()); err != nil {
		r.mend(err.Error(), "")
	} else if lacks, err := process.Lacks(s.Settings.Python, s.Engine.Kind.String()); err != nil {
		r.mend(err.Error(), "")
	} else if lacks {
		r.mend(fmt.Sprintf("--python %s has no %s", s.Settings.Python, name), fmt.Sprintf("run `%s`, or give --python one that has it", s.Engine.Setup))
	} else {
		r.ok("%s has %s", s.Settings.Python, name)
	}
	if gpus := s.Settings.GPUs; len(gpus) > 0 {
		r.ok("%d GPUs for %d workers of %d: %s", len(gpus), s.Settings.NumWorkers, s.Settings.GPUsPerWorker, strings.Join(gpus, ", "))
	} else {
		r.note("no GPU: workers compute on the CPU", "if there should be one, see that nvidia-smi lists it and CUDA_VISIBLE_DEVICES leaves it")
	}
}

// lookAtModel opens the tokenizer of --model.
func lookAtModel(ctx context.Context, name, python string, r *report) {
	ctx, cancel := context.WithTimeout(ctx, modelLimit)
	defer cancel()
	model, err := tokens.Open(ctx, tokens.Opening{Name: name, Python: python}, silent())
	if err != nil {
		r.mend(fmt.Sprintf("--model %s: %v", name, err), "give --model a folder with tokenizer.json, or a name that can be fetched")
		return
	}
	defer model.Close()
	encoder, why := model.Encoder()
	if why != "" {
		r.note(fmt.Sprintf("prompts of %s are encoded by the slower crate %s: %s", name, encoder, why), "")
		return
	}
	r.ok("prompts of %s are encoded by crate %s", name, encoder)
}

// lookAtPorts looks whether the router's own ports, and those of workers that it
// starts, can be opened.
func lookAtPorts(uses []settings.PortUse, r *report) {
	r.about = "ports"
	free := 0
	for _, use := range uses {
		if err := settings.CheckPortsFree([]settings.PortUse{use}); err != nil {
			r.mend(err.Error(), "")
			continue
		}
		free++
	}
	if free > 0 {
		r.ok("%d are free", free)
	}
}
