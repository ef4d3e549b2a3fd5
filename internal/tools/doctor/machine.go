package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/base/web"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/prompt/native"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/tools/mocker"
)

const (
	// modelLimit bounds the time to open a tokenizer, which may be downloaded.
	modelLimit = time.Minute
	// maxFolders is the maximum number of models in --models-dir that are checked.
	maxFolders = 64
	// fewDescriptors is too low a limit for a router with many clients.
	fewDescriptors = 4096
)

// checkMachine checks the router's requirements on this machine: its library, Python, the
// GPUs and the model.
func (c Command) checkMachine(ctx context.Context, s Setup, r *report) {
	if c.Unusable != nil {
		r.fail(c.Unusable.Error(), "")
	}
	for _, name := range slices.Sorted(maps.Keys(c.Misspelt)) {
		r.note(fmt.Sprintf("the environment variable %s is not that of a flag", shorten(name)), "did you mean "+c.Misspelt[name]+"?")
	}
	library := encodes()
	switch {
	case errors.Is(library, native.ErrMissing):
		const remedy = "run scripts/build-native.sh, which needs Rust and a C compiler, and build the router again"
		if !s.Starts && !s.Attached {
			r.fail("the native library is not built: --engine mocker needs it", remedy)
		} else {
			r.note("the native library is not built: workers tokenize the prompts, and there are no simulated workers", remedy)
		}
	case library != nil:
		r.fail("the native library does not encode: "+library.Error(), "rebuild it: make setup")
	default:
		r.ok("the native library works")
	}
	if n := web.Descriptors(); n < fewDescriptors {
		r.note(fmt.Sprintf("the limit of open files and connections is only %d", n),
			"raise the hard limit: ulimit -Hn 65536, or LimitNOFILE= of the systemd unit")
	}
	if s.Starts && c.Unusable == nil {
		checkEngine(s, r)
	}
	if errors.Is(library, native.ErrMissing) || c.Unusable != nil {
		return
	}
	if model := s.Settings.Model; model != "" {
		checkModel(ctx, model, s, r)
	} else if len(s.Workers) > 0 && model == "" {
		r.note("the router has no tokenizer: the workers tokenize each prompt", "set --model to the workers' model, a name or a folder")
	}
	if s.ModelsDir != "" {
		checkFurther(ctx, s, r)
	}
}

// encodes checks the native library.
func encodes() error {
	model, err := mocker.OpenBuiltinModel()
	if err != nil {
		return err
	}
	defer model.Close()
	const text = "kvrouter"
	if encoded := model.Encode(text, false); model.Decode(encoded) != text {
		return fmt.Errorf("%q is decoded as %q", text, model.Decode(encoded))
	}
	return nil
}

// checkEngine checks the parts that start workers.
func checkEngine(s Setup, r *report) {
	name := s.Engine.Signs.Engine
	if _, err := process.NewLauncher(s.Engine, s.Settings, silent()); err != nil {
		r.fail(err.Error(), "")
	} else if lacks, err := process.Lacks(s.Settings.Python, s.Engine.Kind.String()); err != nil {
		r.fail(err.Error(), "")
	} else if lacks {
		r.fail(fmt.Sprintf("--python %s has no %s", s.Settings.Python, name),
			fmt.Sprintf("run `%s`, or set --python to an interpreter that has it", s.Engine.Setup))
	} else {
		r.ok("%s has %s", s.Settings.Python, name)
	}
	if gpus := s.Settings.GPUs; len(gpus) > 0 {
		r.ok("%d GPUs, %d workers with %d each: %s", len(gpus), s.Settings.NumWorkers, s.Settings.GPUsPerWorker, strings.Join(gpus, ", "))
	} else {
		r.note("no GPU found: workers run on the CPU", "if the machine has one, check nvidia-smi and CUDA_VISIBLE_DEVICES")
	}
}

// checkModel opens the tokenizer of --model.
func checkModel(ctx context.Context, name string, s Setup, r *report) {
	ctx, cancel := context.WithTimeout(ctx, modelLimit)
	defer cancel()
	s.Opening.Name, s.Opening.Python = name, s.Settings.Python
	model, err := tokens.Open(ctx, s.Opening, silent())
	if err != nil {
		r.fail(fmt.Sprintf("--model %s: %v", name, err), "set --model to a folder with tokenizer.json, or to a name that can be downloaded")
		return
	}
	defer model.Close()
	describe(name, model, r)
}

// describe reports who encodes and renders the prompts of a model that is open.
func describe(name string, model *tokens.Model, r *report) {
	if why := model.Problem(); why != "" {
		r.note(fmt.Sprintf("the chats of %s are rendered by its workers: %s", name, why), "")
	}
	encoder, why := model.Encoder()
	if why != "" {
		r.note(fmt.Sprintf("%s is tokenized by the slower crate %s: %s", name, encoder, why), "")
		return
	}
	r.ok("%s is tokenized by crate %s", name, encoder)
}

// checkFurther opens the tokenizers below --models-dir, by folders of the form NAME and
// OWNER/NAME.
func checkFurther(ctx context.Context, s Setup, r *report) {
	var folders []string
	for _, pattern := range []string{"*", "*/*"} {
		found, _ := filepath.Glob(filepath.Join(s.ModelsDir, pattern, "tokenizer.json"))
		folders = append(folders, found...)
	}
	if len(folders) > maxFolders {
		r.note(fmt.Sprintf("only %d of %d models in --models-dir are checked", maxFolders, len(folders)), "")
		folders = folders[:maxFolders]
	}
	for _, path := range folders {
		dir := filepath.Dir(path)
		s.Opening.Name = dir
		model, err := tokens.Open(ctx, s.Opening, silent())
		if err != nil {
			r.fail(fmt.Sprintf("the tokenizer in %s is not used, workers tokenize the prompts: %v", dir, err),
				"replace the file, or remove the folder")
			continue
		}
		describe(dir, model, r)
		model.Close()
	}
}

// checkPorts checks that the router's own ports, and those of workers that it starts,
// are free.
func checkPorts(uses []settings.PortUse, r *report) {
	r.about = "ports"
	free := 0
	for _, use := range uses {
		if err := settings.CheckPortsFree([]settings.PortUse{use}); err != nil {
			r.fail(err.Error(), "")
			continue
		}
		free++
	}
	if free > 0 {
		r.ok("%d free", free)
	}
}
