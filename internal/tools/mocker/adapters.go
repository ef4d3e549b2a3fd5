package mocker

import (
	"fmt"
	"net/http"
	"slices"

	"kvrouter/internal/base/jsonbody"
)

// Adapter is a LoRA adapter; without a name it is none.
type Adapter struct {
	Id   int // from 1, never used again
	Name string
}

// served finds the model that a request names; none is the base model.
func (w *Worker) served(name string) (Adapter, *refusal) {
	for _, adapter := range w.loaded() {
		if adapter.Name == name {
			return adapter, nil
		}
	}
	if name == "" || name == w.cfg.ServedModelName {
		return Adapter{}, nil
	}
	return Adapter{}, &refusal{
		http.StatusNotFound, "NotFoundError", fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", name, w.cfg.ServedModelName),
		"model",
	}
}

// loaded lists the adapters that are loaded.
func (w *Worker) loaded() []Adapter {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.adapters)
}

// load adds an adapter. The caller holds w.mu, once the worker runs.
func (w *Worker) load(name string) {
	w.adapterID++
	w.adapters = append(w.adapters, Adapter{w.adapterID, name})
}

// loadAdapter and unloadAdapter serve vLLM's two routes for adapters at run time.
// An adapter's path is not looked at.
func (w *Worker) loadAdapter(out http.ResponseWriter, in *http.Request) {
	w.changeAdapters(out, in, func(body *jsonbody.Body, name string) (string, *refusal) {
		at := w.adapter(name)
		switch {
		case name == "" || body.Get("lora_path").String() == "":
			return "", &refusal{http.StatusBadRequest, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.", ""}
		case name == w.cfg.ServedModelName:
			return "", &refusal{http.StatusBadRequest, "InvalidUserInput",
				fmt.Sprintf("The lora adapter '%s' conflicts with a served base model.", name), ""}
		case at >= 0 && !body.Get("load_inplace").Bool():
			return "", &refusal{http.StatusBadRequest, "InvalidUserInput",
				fmt.Sprintf("The lora adapter '%s' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True.",
					name), ""}
		case at < 0:
			w.load(name)
		}
		return fmt.Sprintf("Success: LoRA adapter '%s' added successfully.", name), nil
	})
}

func (w *Worker) unloadAdapter(out http.ResponseWriter, in *http.Request) {
	w.changeAdapters(out, in, func(_ *jsonbody.Body, name string) (string, *refusal) {
		at := w.adapter(name)
		switch {
		case name == "":
			return "", &refusal{http.StatusBadRequest, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.", ""}
		case at < 0:
			return "", &refusal{http.StatusNotFound, "NotFoundError", fmt.Sprintf("The lora adapter '%s' cannot be found.", name), ""}
		}
		w.adapters = slices.Delete(w.adapters, at, at+1)
		return fmt.Sprintf("Success: LoRA adapter '%s' removed successfully.", name), nil
	})
}

// adapter is where a loaded adapter is in the list, or -1. The caller holds
// w.mu.
func (w *Worker) adapter(name string) int {
	return slices.IndexFunc(w.adapters, func(a Adapter) bool { return a.Name == name })
}

// changeAdapters answers a request with what change, which holds w.mu, makes of
// it.
func (w *Worker) changeAdapters(out http.ResponseWriter, in *http.Request,
	change func(body *jsonbody.Body, name string) (string, *refusal)) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	w.mu.Lock()
	says, problem := change(body, body.Get("lora_name").String())
	w.mu.Unlock()
	if problem != nil {
		w.writeError(out, in, problem)
		return
	}
	fmt.Fprint(out, says)
}
