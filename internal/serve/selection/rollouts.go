package selection

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/fleet/workers"
)

// TrainerRoutes returns the routes by which RL trainers manage workers: those of sglang-router, SMG and vllm-router.
// The caller checks keys.
func (s *Service) TrainerRoutes() http.Handler {
	engine := web.NewEngine(s.log)
	s.byURL(engine)
	engine.GET("/workers", s.trainersWorkers)
	engine.POST("/workers", withBody(s.addTrainers))
	engine.GET("/workers/:id", s.trainersWorker)
	engine.DELETE("/workers/:id", s.removeTrainers)
	return engine
}

// trainersSpec is what a trainer says of a worker that it adds. Other fields say nothing: the worker is asked.
type trainersSpec struct {
	URL    string    `json:"url"`
	Type   string    `json:"worker_type"` // regular (default), prefill or decode
	APIKey kv.Secret `json:"api_key"`
}

// addTrainers adds a worker and answers once it is ready. A known one is fine: trainers repeat the call.
func (s *Service) addTrainers(c *gin.Context, spec trainersSpec) {
	url, err := kv.ParseURL(spec.URL)
	switch {
	case spec.URL == "":
		err = errors.New("url is missing")
	case err != nil:
		err = fmt.Errorf("url: %w", err)
	case !slices.Contains([]string{"", "regular", "prefill", "decode"}, spec.Type):
		err = fmt.Errorf("worker_type %.40q: want regular, prefill or decode", spec.Type)
	default:
		err = (workerSpec{APIKey: &spec.APIKey}).check()
	}
	if err != nil {
		plainError(c, http.StatusUnprocessableEntity, "bad body: "+err.Error())
		return
	}
	status, message := http.StatusCreated, "worker added"
	id, err := s.attach(c.Request.Context(), url, spec.APIKey)
	if errors.Is(err, workers.ErrKnown) {
		known, up := s.known(url)
		if !up {
			plainError(c, http.StatusConflict, url+" is known and not ready: "+known.State)
			return
		}
		id, err, status, message = known.ID, nil, http.StatusOK, "worker known"
	}
	if err != nil {
		plainError(c, attachStatus(err), attachError(url, err))
		return
	}
	w, _ := s.fleet.Worker(id)
	if asked := trainersRole(spec.Type); asked != w.Disagg.Role {
		s.log.Warn("a trainer registers a worker as another one than it says that it is", "worker", id, "url", url, "registered_as", asked,
			"is", w.Disagg.Role)
	}
	name := strconv.FormatUint(id, 10)
	c.Header("Location", "/workers/"+name)
	c.JSON(status, gin.H{"status": "ready", "id": name, "worker_id": name, "url": url, "location": "/workers/" + name, "message": message})
}

// trainersRole is the role of a worker of that type.
func trainersRole(kind string) kv.Role {
	switch kind {
	case "prefill":
		return kv.RolePrefill
	case "decode":
		return kv.RoleDecode
	}
	return kv.RoleBoth
}

// known returns the worker at a URL, and whether it is up.
func (s *Service) known(url string) (w workers.Status, up bool) {
	all := s.fleet.Workers()
	at := slices.IndexFunc(all, func(w workers.Status) bool { return w.URL == url })
	if at < 0 {
		return w, false
	}
	return all[at], s.up(all[at].ID)
}

// up reports whether a worker gets requests, as soon as its engine runs.
func (s *Service) up(id uint64) bool {
	t, up := s.target(id)
	return up && !t.Cordoned && !t.Unanswered
}

// target returns the first rank of a worker that is up; not ok: none is.
func (s *Service) target(id uint64) (t kv.Target, ok bool) {
	targets := s.models.Targets()
	at := slices.IndexFunc(targets, func(t kv.Target) bool { return t.Key.Worker == id })
	if at < 0 {
		return t, false
	}
	return targets[at], true
}

// trainersView is a worker as trainers read it.
type trainersView struct {
	ID      string    `json:"id"`
	URL     string    `json:"url"`
	Type    string    `json:"worker_type"`
	Engine  kv.Engine `json:"runtime_type"`
	Model   string    `json:"model_id,omitempty"`
	Healthy bool      `json:"is_healthy"`
	State   string    `json:"status"`
	Does    string    `json:"engine_state"`             // running, paused, updating or asleep
	Version string    `json:"weight_version,omitempty"` // as far as it is known
	Load    int       `json:"load"`                     // requests in flight
	Since   time.Time `json:"since"`
}

func (s *Service) trainersViewOf(w workers.Status) trainersView {
	v := trainersView{ID: strconv.FormatUint(w.ID, 10), URL: w.URL, Type: "regular", Engine: w.Engine, Healthy: s.up(w.ID), State: w.State, Since: w.Since}
	if role := w.Disagg.Role; role != kv.RoleBoth {
		v.Type = role.String()
	}
	t, _ := s.target(w.ID)
	state, version := s.models.Engine(t.Key)
	v.Does, v.Version = state.String(), version
	if len(w.Models) > 0 {
		v.Model = w.Models[0]
	}
	for _, key := range w.Keys() {
		v.Load += s.models.LoadOf(key).InFlight
	}
	return v
}

// trainersWorkers lists all workers.
func (s *Service) trainersWorkers(c *gin.Context) {
	list, healthy, load := []trainersView{}, 0, 0
	for _, w := range s.fleet.Workers() {
		v := s.trainersViewOf(w)
		if v.Healthy {
			healthy++
		}
		load += v.Load
		list = append(list, v)
	}
	c.JSON(http.StatusOK, gin.H{"workers": list, "total": len(list), "stats": gin.H{
		"total_workers": len(list), "healthy_workers": healthy, "total_load": load,
	}})
}

// trainersWorker shows one.
func (s *Service) trainersWorker(c *gin.Context) {
	if w, ok := s.named(c.Param("id")); ok {
		c.JSON(http.StatusOK, s.trainersViewOf(w))
		return
	}
	plainError(c, http.StatusNotFound, fmt.Sprintf("worker %.80s not found", c.Param("id")))
}

// named returns the worker with that id.
func (s *Service) named(text string) (w workers.Status, ok bool) {
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return w, false
	}
	return s.fleet.Worker(id)
}

// removeTrainers removes a worker; its in-flight requests go on. An unknown one counts as removed: trainers repeat the call.
func (s *Service) removeTrainers(c *gin.Context) {
	if w, ok := s.named(c.Param("id")); ok && !s.detach(w.URL) {
		plainError(c, http.StatusConflict, fmt.Sprintf("worker %d was started by the router, or attached by --worker: it cannot be removed", w.ID))
		return
	}
	c.JSON(http.StatusAccepted, gin.H{"status": "accepted", "worker_id": c.Param("id"), "message": "worker removed"})
}
