package mocker

import (
	"cmp"
	"context"
	"net/http"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/tools/engine"
)

// What trainers call at an engine between two steps: pauses, and new weights. New weights change
// nothing but their version.

// defaultVersion is the version of weights before any update.
const defaultVersion = "default"

// weights returns the version of the weights.
func (w *Worker) weights() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return cmp.Or(w.version, defaultVersion)
}

// updateWeights notes a version; empty: it stays.
func (w *Worker) updateWeights(version string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.version = cmp.Or(version, w.version)
}

// hold pauses or resumes all engines, and calls f with each. It returns false if the client has left, or the worker has
// ended.
func (w *Worker) hold(ctx context.Context, hold engine.Hold, f func(*Rank, *engine.Engine)) bool {
	w.held.Store(hold != engine.HoldNothing)
	for _, rank := range w.Ranks {
		if !rank.Ask(ctx, func(e *engine.Engine) {
			e.Hold = hold
			f(rank, e)
		}) {
			return false
		}
	}
	return true
}

// abortAll ends all requests with the finish reason abort.
func (w *Worker) abortAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.running {
		r.abort()
	}
}

// settled waits until no engine runs a request. It returns false if the client has left, or the worker has ended.
func (w *Worker) settled(ctx context.Context) bool {
	for {
		busy := 0
		for _, rank := range w.Ranks {
			if !rank.Ask(ctx, func(e *engine.Engine) {
				running, _, _ := e.Load()
				busy += running
			}) {
				return false
			}
		}
		if busy == 0 {
			return true
		}
		if !w.wait(stuckPoll) {
			return false
		}
	}
}

func nothing(*Rank, *engine.Engine) {}

// addVLLMTraining adds the routes of vLLM in development mode.
func (w *Worker) addVLLMTraining(mux *http.ServeMux) {
	mux.HandleFunc("POST /pause", w.pause)
	mux.HandleFunc("POST /resume", func(out http.ResponseWriter, in *http.Request) {
		if w.hold(in.Context(), engine.HoldNothing, nothing) {
			answerJSON(out, http.StatusOK, map[string]any{"status": "resumed"})
		}
	})
	mux.HandleFunc("GET /is_paused", func(out http.ResponseWriter, _ *http.Request) {
		answerJSON(out, http.StatusOK, map[string]any{"is_paused": w.held.Load()})
	})
	mux.HandleFunc("POST /sleep", w.sleep)
	mux.HandleFunc("POST /wake_up", func(out http.ResponseWriter, in *http.Request) {
		w.asleep.Store(false)
		if w.hold(in.Context(), engine.HoldNothing, nothing) {
			answerJSON(out, http.StatusOK, map[string]any{"status": "awake"})
		}
	})
	mux.HandleFunc("GET /is_sleeping", func(out http.ResponseWriter, _ *http.Request) {
		answerJSON(out, http.StatusOK, map[string]any{"is_sleeping": w.held.Load()}) // as vLLM, which is asleep when it is only paused
	})
	mux.HandleFunc("GET /weight_info", func(out http.ResponseWriter, _ *http.Request) {
		answerJSON(out, http.StatusOK, map[string]any{"weight_version": w.weights()})
	})
	mux.HandleFunc("POST /update_weights", w.serve(func(*http.Request, *jsonbody.Body) (any, *refusal) {
		return map[string]any{"message": "Weight update completed"}, nil
	}))
	for path, field := range map[string]string{"/finish_weight_update": "weight_version", "/update_weight_version": "new_version"} {
		mux.HandleFunc("POST "+path, w.serve(func(_ *http.Request, body *jsonbody.Body) (any, *refusal) {
			w.updateWeights(body.Get(field).Str)
			return map[string]any{"message": "Weight version updated"}, nil
		}))
	}
}

// pause is vLLM's. With clear_cache, which is the default, it resets the cache in mode keep, too: running requests are
// preempted.
func (w *Worker) pause(out http.ResponseWriter, in *http.Request) {
	mode, clear := cmp.Or(in.URL.Query().Get("mode"), "abort"), in.URL.Query().Get("clear_cache") != "false"
	reset := func(r *Rank, e *engine.Engine) {
		if clear {
			e.Retract()
			r.ResetPrefixCache(e, false)
		}
	}
	var done bool
	switch mode {
	case "keep":
		done = w.hold(in.Context(), engine.HoldAll, reset)
	case "abort", "wait":
		done = w.hold(in.Context(), engine.HoldWaiting, nothing)
		if mode == "abort" {
			w.abortAll()
		}
		done = done && w.settled(in.Context()) && w.hold(in.Context(), engine.HoldAll, reset)
	default:
		answerJSON(out, http.StatusBadRequest, map[string]any{"error": "Invalid mode: " + mode + ". Must be one of: abort, wait, keep"})
		return
	}
	if done {
		answerJSON(out, http.StatusOK, map[string]any{"status": "paused"})
	}
}

// sleep is vLLM's: requests stop as in a pause, and from level 1 on the cache is lost.
func (w *Worker) sleep(out http.ResponseWriter, in *http.Request) {
	if in.URL.Query().Get("level") == "0" {
		w.pause(out, in)
		return
	}
	w.abortAll()
	w.asleep.Store(true)
	if w.settled(in.Context()) && w.hold(in.Context(), engine.HoldAll, func(r *Rank, e *engine.Engine) { r.ResetPrefixCache(e, false) }) {
		answerJSON(out, http.StatusOK, map[string]any{"status": "sleeping"})
	}
}

// addSGLangTraining adds SGLang's routes.
func (w *Worker) addSGLangTraining(post func(path string, serve http.HandlerFunc)) {
	post("/pause_generation", w.pauseGeneration)
	post("/continue_generation", func(out http.ResponseWriter, in *http.Request) {
		if w.hold(in.Context(), engine.HoldNothing, nothing) {
			answerJSON(out, http.StatusOK, map[string]any{"status": "ok", "message": "Generation continued successfully."})
		}
	})
	post("/release_memory_occupation", w.serve(func(in *http.Request, _ *jsonbody.Body) (any, *refusal) {
		idle, ended := w.resetCaches(in.Context(), true)
		if !idle || ended {
			return nil, &refusal{http.StatusBadRequest, badBody, "release_memory_occupation should be called only when server is idle.", ""}
		}
		w.asleep.Store(true)
		return nil, nil
	}))
	post("/resume_memory_occupation", w.serve(func(*http.Request, *jsonbody.Body) (any, *refusal) {
		w.asleep.Store(false)
		return nil, nil
	}))
	for _, path := range []string{"/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_tensor"} {
		post(path, w.serve(func(in *http.Request, body *jsonbody.Body) (any, *refusal) {
			if flush := body.Get("flush_cache"); !flush.Exists() || flush.Bool() {
				if idle, ended := w.resetCaches(in.Context(), true); ended || !idle {
					return nil, &refusal{http.StatusBadRequest, badBody, "Cache flush failed after updating weights", ""}
				}
			}
			w.updateWeights(body.Get("weight_version").Str)
			return map[string]any{"success": true, "message": "Succeeded to update model weights.", "num_paused_requests": 0}, nil
		}))
	}
	post("/update_weight_version", w.serve(func(_ *http.Request, body *jsonbody.Body) (any, *refusal) {
		if all := body.Get("abort_all_requests"); !all.Exists() || all.Bool() {
			w.abortAll()
		}
		w.updateWeights(body.Get("new_version").Str)
		return map[string]any{"success": true, "message": "Weight version updated to " + w.weights(), "new_version": w.weights()}, nil
	}))
}

// pauseGeneration is SGLang's. New requests wait in every mode.
func (w *Worker) pauseGeneration(out http.ResponseWriter, in *http.Request) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	var done bool
	switch mode := cmp.Or(body.Get("mode").Str, "abort"); mode {
	case "abort":
		done = w.hold(in.Context(), engine.HoldWaiting, nothing)
		w.abortAll()
		done = done && w.settled(in.Context())
	case "retract":
		done = w.hold(in.Context(), engine.HoldAll, func(r *Rank, e *engine.Engine) {
			e.Retract()
			r.publishChanges()
		})
	case "in_place":
		done = w.hold(in.Context(), engine.HoldAll, nothing)
	default:
		w.writeError(out, in, badRequest("mode", "mode %q: want abort, retract or in_place", mode))
		return
	}
	if done {
		answerJSON(out, http.StatusOK, map[string]any{"status": "ok", "message": "Generation paused successfully."})
	}
}
