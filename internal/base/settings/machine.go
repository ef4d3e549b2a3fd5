package settings

import (
	"cmp"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// Machine describes the resources that defaults depend on. Tests use their own.
type Machine struct {
	Cores  int
	Memory int64                   // that may be used, bytes; 0: unknown
	GPUs   func() []string         // devices that may be used, in order; none: CPU
	Getenv func(key string) string // environment
	IsFile func(path string) bool
	IsDir  func(path string) bool
}

// ThisMachine returns the machine that the program runs on.
func ThisMachine() Machine {
	exists := func(path string, dir bool) bool {
		info, err := os.Stat(path)
		return err == nil && info.IsDir() == dir
	}
	return Machine{
		Cores:  runtime.GOMAXPROCS(0), // cores, or the container's share of them
		Memory: thisMemory(os.ReadFile),
		GPUs:   visibleGPUs,
		Getenv: os.Getenv,
		IsFile: func(path string) bool { return exists(path, false) },
		IsDir:  func(path string) bool { return exists(path, true) },
	}
}

// visibleGPUs returns the NVIDIA devices that CUDA_VISIBLE_DEVICES leaves, or
// all that nvidia-smi lists.
func visibleGPUs() []string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second) // the first call loads the driver
	defer cancel()
	cmd := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
	cmd.WaitDelay = time.Second
	listing, err := cmd.Output()
	if err != nil {
		return nil
	}
	found := strings.Fields(string(listing))
	chosen, restricted := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	if !restricted || len(found) == 0 {
		return found
	}
	var gpus []string
	for name := range strings.SplitSeq(chosen, ",") {
		name = strings.TrimSpace(name)
		if name == "" || name == "-1" { // CUDA ignores what follows an invalid entry
			break
		}
		gpus = append(gpus, name)
	}
	return gpus
}

// CacheDir returns the folder for downloads.
func CacheDir(getenv func(string) string) string {
	return filepath.Join(cmp.Or(getenv("XDG_CACHE_HOME"), filepath.Join(getenv("HOME"), ".cache")), "kvrouter")
}

// LooksLikePath reports whether a model is a path and not a Hugging Face name, which has
// at most one slash, in its middle.
func LooksLikePath(model string) bool {
	return strings.HasPrefix(model, "/") || strings.HasPrefix(model, "./") || strings.HasPrefix(model, "../") ||
		strings.HasPrefix(model, "~") || strings.Count(model, "/") > 1
}
