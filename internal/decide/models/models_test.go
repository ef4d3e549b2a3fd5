package models_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/nativetest"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
)

// newSet returns models whose default one has blocks of testkit.BlockSize tokens.
func newSet(t *testing.T, settings models.Settings, change ...func(*router.Settings)) *models.Set {
	t.Helper()
	return newLoggingSet(t, slog.New(slog.DiscardHandler), settings, change...)
}

func newLoggingSet(t *testing.T, log *slog.Logger, settings models.Settings, change ...func(*router.Settings)) *models.Set {
	t.Helper()
	settings.Policy, settings.Scoring, settings.Index, settings.Routing = "round-robin", testkit.Defaults[policies.Settings](), testkit.Defaults[router.IndexSettings](), testkit.Defaults[router.Settings]()
	for _, f := range change {
		f(&settings.Routing)
	}
	settings.BlockSize, settings.Seed, settings.TokenTimeout = testkit.BlockSize, 1, time.Second
	index, _ := router.NewIndex(settings.Index, settings.Policy, settings.Scoring.Settings, settings.BlockSize, time.Now)
	return models.New(settings, models.Deps{
		Router: router.New(settings.Routing, router.Deps{Index: index, Policy: policytest.MustPolicy(t, settings.Policy), BlockSize: settings.BlockSize, Seed: 1}), Index: index,
		Ask: func(context.Context, kv.Target, string, string, http.Header, []byte) (int, []byte, error) {
			return http.StatusNotFound, nil, nil
		},
		Log: log,
	})
}

// serves is a worker's word: its base model's names.
func serves(root string, names ...string) kv.Served {
	return kv.Served{Names: names, Root: root}
}

// join has a worker join and come up with its names.
func join(t *testing.T, s *models.Set, worker uint64, of kv.Served, adapters ...string) *models.Model {
	t.Helper()
	index, err := s.Join(worker, of)
	if err != nil {
		t.Fatal(err)
	}
	s.Up(kv.Target{Key: kv.WorkerKey{Worker: worker}, Generation: 1, URL: fmt.Sprintf("http://worker-%d", worker), Models: append(slices.Clone(of.Names), adapters...), Adapters: adapters})
	m := s.For(worker)
	if m.Index != index {
		t.Fatalf("worker %d: joined another index than that of %q", worker, m.Name)
	}
	return m
}

// leave has a worker go.
func leave(s *models.Set, worker uint64) {
	s.Down(kv.Target{Key: kv.WorkerKey{Worker: worker}}, "")
	s.Leave(worker)
}

func TestAWorkerBelongsToTheModelThatItServes(t *testing.T) {
	for _, test := range []struct {
		name     string
		settings models.Settings
		before   []kv.Served // of workers that are there
		of       kv.Served
		own      string // name of the further model; empty: the default one
	}{
		{"by its name", models.Settings{ServedModelName: "a", Model: "/models/x"}, nil, serves("other", "a"), ""},
		{"by another of its names", models.Settings{ServedModelName: "a"}, nil, serves("", "alias", "a"), ""},
		{"by its files", models.Settings{ServedModelName: "a", Model: "org/Model-1B"}, nil, serves("org/Model-1B", "prod"), ""},
		{"by its files in another folder", models.Settings{ServedModelName: "a", Model: "/here/model-1b"}, nil, serves("/there/Model-1B", "prod"), ""},
		{"by its files on Windows", models.Settings{ServedModelName: "a", Model: "/here/model-1b"}, nil, serves(`C:\there\model-1b`, "prod"), ""},
		{"it reports no name", models.Settings{ServedModelName: "a"}, nil, kv.Served{}, ""},
		{"another name and no files", models.Settings{ServedModelName: "a", Model: "org/a"}, nil, serves("", "b"), "b"},
		{"another name and files", models.Settings{ServedModelName: "a", Model: "org/a"}, nil, serves("org/b", "b"), "b"},
		{"first where none is configured", models.Settings{}, nil, serves("", "b"), ""},
		{"like the first", models.Settings{}, []kv.Served{serves("", "a")}, serves("", "a"), ""},
		{"unlike the first", models.Settings{}, []kv.Served{serves("", "a")}, serves("", "b"), "b"},
		{"like one that is known", models.Settings{}, []kv.Served{serves("", "a"), serves("", "b")}, serves("", "b"), "b"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSet(t, test.settings)
			for i, one := range test.before {
				join(t, s, uint64(10+i), one)
			}
			m := join(t, s, 1, test.of)
			if (m == s.Default()) != (test.own == "") || test.own != "" && m.Name != test.own {
				t.Errorf("it belongs to %q, the default one: %v", m.Name, m == s.Default())
			}
		})
	}
}

func TestANameLeadsToTheModelWhoseWorkersHaveIt(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	if m, known := s.Of("anything"); m != s.Default() || !known {
		t.Error("while no worker is up nobody can tell that a model does not exist")
	}
	join(t, s, 1, serves("", "a"), "sql", "both")
	b := join(t, s, 2, serves("", "b", "alias"), "legal", "both")
	for _, test := range []struct {
		name  string
		want  *models.Model
		known bool
	}{
		{"", s.Default(), true}, {"a", s.Default(), true}, {"sql", s.Default(), true}, {"both", s.Default(), true},
		{"b", b, true}, {"alias", b, true}, {"legal", b, true}, {"c", s.Default(), false},
	} {
		if m, known := s.Of(test.name); m != test.want || known != test.known {
			t.Errorf("%q leads to %q, known: %v", test.name, m.Name, known)
		}
	}

	leave(s, 2)
	for _, name := range []string{"b", "legal"} {
		if m, known := s.Of(name); m != b || !known {
			t.Errorf("while its workers are away %q leads to %q, known: %v", name, m.Name, known)
		}
	}
	if m := join(t, s, 3, serves("", "b")); m != b {
		t.Error("a model that comes back is another one")
	}
	if _, known := s.Of("legal"); known {
		t.Error("an adapter is known that no worker has any more")
	}
	leave(s, 1)
	if m, known := s.Of("sql"); m != s.Default() || !known {
		t.Errorf("sql of the default model leads to %q, known: %v", m.Name, known)
	}
	if _, known := s.Of("c"); known {
		t.Error("c is known although a worker is up that could tell, and none was told of it")
	}
}

// TestTheDefaultModelThatNobodyToldOfIsTheFirstThatHasWorkers: a fleet of one model that
// changes it keeps what is for the default one only.
func TestTheDefaultModelThatNobodyToldOfIsTheFirstThatHasWorkers(t *testing.T) {
	s := newSet(t, models.Settings{})
	if s.For(1) != s.Default() {
		t.Error("a worker that has not joined belongs to a further model")
	}
	for i, step := range []struct {
		worker uint64
		name   string // empty: it leaves
		own    bool   // it is a model of its own
	}{{1, "a", false}, {2, "b", true}, {1, "", false}, {3, "b", true}, {1, "a", false}, {1, "", false}, {1, "c", false}, {4, "a", true}, {5, "c", false}} {
		if step.name == "" {
			leave(s, step.worker)
			continue
		}
		if m := join(t, s, step.worker, serves("", step.name)); (m != s.Default()) != step.own || step.own && m.Name != step.name {
			t.Errorf("step %d: worker %d of %s belongs to %q, the default one: %v", i, step.worker, step.name, m.Name, m == s.Default())
		}
	}
	if samples := s.Samples(); samples[0].Name != "c" || samples[0].Ranks != 2 {
		t.Errorf("the default model is shown as %+v", samples[0])
	}
}

func TestAnAdapterDoesNotTakeABaseModelsName(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	join(t, s, 1, serves("", "a"), "b", "c")
	join(t, s, 2, serves("", "x"), "b", "a")
	b := join(t, s, 3, serves("", "b"))
	for name, want := range map[string]*models.Model{"a": s.Default(), "b": b, "c": s.Default()} {
		if m, known := s.Of(name); m != want || !known {
			t.Errorf("%q leads to %q, known: %v", name, m.Name, known)
		}
	}
}

func TestWorkersThatTellNothingTakeNoOtherModelsRequests(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	join(t, s, 1, kv.Served{}) // serves any
	b := join(t, s, 2, serves("", "b"))
	if m, known := s.Of("c"); m != s.Default() || !known {
		t.Errorf("c leads to %q, known: %v", m.Name, known)
	}
	leave(s, 2)
	if m, known := s.Of("b"); m != b || !known {
		t.Errorf("b leads to %q, known: %v", m.Name, known)
	}
}

// TestModelsShareNothing: the same token ids, in blocks of the same size, are other
// blocks, and one model's decisions leave the other's as they would be.
func TestModelsShareNothing(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	a, b := join(t, s, 1, serves("", "a")), join(t, s, 3, serves("", "b"))
	join(t, s, 2, serves("", "a"))
	join(t, s, 4, serves("", "b"))
	prompt := testkit.Tokens(1, 12)
	local := kv.HashBlocks(nil, prompt, testkit.BlockSize, "", "")
	blocks := make([]kv.StoredBlock, len(local))
	for i, h := range local {
		blocks[i] = kv.StoredBlock{Engine: uint64(i), Local: h}
	}
	for _, worker := range []uint64{1, 2} {
		if err := radixtest.Store(a.Index, kv.WorkerKey{Worker: worker}, 0, false, blocks); err != nil {
			t.Fatal(err)
		}
	}
	order := func(m *models.Model) (worker uint64, overlap int) {
		d, err := m.Router.Route(t.Context(), router.Request{Tokens: prompt, Model: m.Name})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Booking.End()
		return d.Target.Key.Worker, d.Overlap
	}
	for i := range 6 {
		if worker, overlap := order(a); worker != uint64(1+i%2) || overlap != 2 { // the last token is computed always
			t.Errorf("request %d for a: worker %d with %d blocks", i, worker, overlap)
		}
		for n := range 1 + i { // round robin would be shifted by the other's requests
			worker, overlap := order(b)
			if overlap != 0 || worker != 3 && worker != 4 {
				t.Errorf("request %d.%d for b: worker %d with %d blocks", i, n, worker, overlap)
			}
		}
	}
	if n := s.Blocks(kv.WorkerKey{Worker: 1}); n != 3 {
		t.Errorf("worker 1 has %d blocks", n)
	}
	if n := s.Blocks(kv.WorkerKey{Worker: 3}); n != 0 {
		t.Errorf("worker 3 has %d blocks", n)
	}
	d, err := a.Router.Route(t.Context(), router.Request{Tokens: prompt})
	if err != nil {
		t.Fatal(err)
	}
	if !s.Busy(d.Target.Key.Worker) || s.LoadOf(d.Target.Key).InFlight != 1 || s.LoadOf(kv.WorkerKey{Worker: 3}).InFlight != 0 {
		t.Error("a booking is not on the books of its own model alone")
	}
	d.Booking.End()
}

// TestOddNamesStayBounded: a worker that names itself anew for ever costs no more than
// MaxModels, and takes nobody's place who has workers.
func TestOddNamesStayBounded(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	join(t, s, 1, serves("", "a"))
	b := join(t, s, 2, serves("", "b"))
	for i := range 5 * models.MaxModels {
		join(t, s, 3, serves("", fmt.Sprint("odd ", i)))
		leave(s, 3)
	}
	if n := len(s.All()); n != models.MaxModels {
		t.Errorf("%d models", n)
	}
	if m, known := s.Of("b"); m != b || !known {
		t.Errorf("b leads to %q", m.Name)
	}
	for i := range models.MaxModels - 2 {
		join(t, s, uint64(10+i), serves("", fmt.Sprint("real ", i)))
	}
	if _, err := s.Join(99, serves("", "one more")); err == nil || !strings.Contains(err.Error(), fmt.Sprint(models.MaxModels)) {
		t.Errorf("one more than may be: %v", err)
	}
	if s.For(99) != s.Default() {
		t.Error("a worker that was refused belongs to a model")
	}
	join(t, s, 98, serves("", "real 3")) // of one that is known there may be more workers
	if _, err := s.Join(99, serves("", strings.Repeat("x", 300))); err == nil || !strings.Contains(err.Error(), "300 bytes") {
		t.Error("a name of 300 bytes is taken")
	}
}

func TestAWorkerThatIsHeldIsHeldInEveryModel(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	join(t, s, 1, serves("", "a"))
	s.CordonDiscovered(1, true)
	leave(s, 1)
	m := join(t, s, 1, serves("", "b"))
	if m.Router.Schedulable() != 0 || s.Schedulable() != 0 {
		t.Error("it gets requests as a worker of another model")
	}
	s.CordonDiscovered(1, false)
	if s.Schedulable() != 1 {
		t.Error("it gets none once it is let go")
	}
}

func TestBusyThresholdsHoldForEveryModel(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	b := join(t, s, 1, serves("", "b"))
	limit, lower := 100, 50
	s.SetBusyThresholds(router.BusyThresholds{ActivePrefillTokensThreshold: &limit})
	c := join(t, s, 2, serves("", "c"))
	for _, m := range []*models.Model{s.Default(), b, c} {
		if got := m.Router.Admission.BusyThresholds().ActivePrefillTokensThreshold; got == nil || *got != limit {
			t.Errorf("%q has the threshold %v", m.Name, got)
		}
	}
	s.ChangeBusyThresholds(router.BusyThresholds{ActivePrefillTokensThreshold: &lower})
	if got := b.Router.Admission.BusyThresholds().ActivePrefillTokensThreshold; got == nil || *got != lower {
		t.Errorf("b has the threshold %v", got)
	}
}

func TestWhatIsShownIsOfAllModels(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	join(t, s, 2, serves("", "a"))
	b := join(t, s, 1, serves("", "b"))
	s.Decisions(10)
	book := func(m *models.Model) *router.Booking {
		d, err := m.Router.Route(t.Context(), router.Request{NumTokens: 5})
		if err != nil {
			t.Fatal(err)
		}
		return d.Booking
	}
	first := book(b)
	defer first.End()
	second := book(s.Default())
	defer second.End()
	if targets := s.Targets(); len(targets) != 2 || targets[0].Key.Worker != 1 || s.Count() != 2 {
		t.Errorf("targets %v", targets)
	}
	if loads := s.Loads(); len(loads) != 2 || loads[0].Key.Worker != 1 || loads[0].ActiveRequests != 1 {
		t.Errorf("loads %v", loads)
	}
	if records, _ := s.Outliers(); len(records) != 2 {
		t.Errorf("records %v", records)
	}
	if list, explained := s.Decisions(1); len(list) != 1 || *list[0].Worker != 2 || !explained {
		t.Errorf("the last decision: %v", list)
	}
	if err := s.Cordon(1); err != nil || len(s.Cordoned()) != 1 || b.Router.Schedulable() != 0 {
		t.Errorf("rest: %v", err)
	}
	if err := s.Readmit(1); err != nil || len(s.Cordoned()) != 0 {
		t.Errorf("readmit: %v", err)
	}
	if err := s.Readmit(9); err == nil {
		t.Error("a worker that nobody knows is readmitted")
	}
	b.Requests.Add(3)
	samples := s.Samples()
	if len(samples) != 2 || samples[0].Name != "a" || samples[1].Name != "b" || samples[1].BlockSize != testkit.BlockSize || samples[1].InFlight != 1 || samples[1].Ranks != 1 || samples[1].Requests != 3 || samples[1].Local {
		t.Errorf("%+v", samples)
	}

	// A worker that changes its model while a request runs is shown once.
	leave(s, 1)
	join(t, s, 1, serves("", "c"))
	if loads := s.Loads(); len(loads) != 2 || loads[0].ActiveRequests != 0 {
		t.Errorf("loads %v", loads)
	}
	if !s.Busy(1) {
		t.Error("its request has been forgotten")
	}
}

func TestTokenizerFilesAreFoundByNameAndNeverOutsideTheirFolder(t *testing.T) {
	nativetest.Library(t)
	root := t.TempDir()
	dir := filepath.Join(root, "models")
	t.Setenv("HF_HUB_CACHE", filepath.Join(root, "hub"))
	for _, name := range []string{"full/name", "last", "prod", "../outside"} {
		testkit.TokenizerFolder(t, filepath.Join(dir, name))
	}
	for _, repository := range []string{"models--org--cached", "models--org--other"} {
		hub := filepath.Join(root, "hub", repository)
		testkit.TokenizerFolder(t, filepath.Join(hub, "snapshots", "1"))
		if err := os.MkdirAll(filepath.Join(hub, "refs"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(hub, "refs", "main"), []byte("1"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := newSet(t, models.Settings{Flags: models.Flags{ModelsDir: dir}, ServedModelName: "a"})
	worker := uint64(0)
	for _, test := range []struct {
		name, root string
		local      bool
	}{
		{"full/name", "", true}, {"x/last", "", true}, {"served", "/their/models/last", true}, {"prod", "org/unknown", true}, {"org/cached", "", true}, {"served 2", "org/cached", true},
		{"unknown", "", false}, {"../outside", "", false}, {"/outside", "", false}, {"..", "", false}, {".", "", false}, {"full/../../outside", "", false}, {"last/..", "", false}, {"last/../../outside", "x/..", false},
		{"\x00", "", false}, {"../outside\x00", "last\x00", false}, {`..\outside`, "", false}, {"long", strings.Repeat("../", 1<<18) + "outside", false}, {"long too", strings.Repeat("last/", 1<<18), false}, {"name", "", false},
		{"org/cached/..", "", false}, {"org/other", "org/not-here", false}, // the name that clients use is not what it is
	} {
		worker++
		if m := join(t, s, worker, serves(test.root, test.name)); m.Tokens.Local() != test.local {
			t.Errorf("%q of %q: a tokenizer here: %v, want %v", test.name, test.root, m.Tokens.Local(), test.local)
		}
	}
}

// TestATokenizerOutlivesItsModel: what was opened is used again, and not opened once a
// visit.
func TestATokenizerOutlivesItsModel(t *testing.T) {
	nativetest.Library(t)
	dir := t.TempDir()
	testkit.TokenizerFolder(t, filepath.Join(dir, "b"))
	s := newSet(t, models.Settings{Flags: models.Flags{ModelsDir: dir}, ServedModelName: "a"})
	parsed, _ := jsonbody.Parse([]byte(`{"prompt":"a b"}`))
	for i := range models.MaxModels - 2 { // so that there is room for one
		join(t, s, uint64(10+i), serves("", fmt.Sprint("real ", i)))
	}
	for i := range 2 * models.MaxModels {
		m := join(t, s, 1, serves("org/b", fmt.Sprint("b", i))) // another model each time
		prompts := m.Tokens.CompletionBody(t.Context(), parsed)
		if len(prompts) != 1 || prompts[0].Source != tokens.SourceLocal {
			t.Fatalf("round %d: %+v", i, prompts)
		}
		if n := s.Prompts().Local; n != uint64(i+1) { // those of the models before it are not forgotten
			t.Errorf("round %d: %d prompts", i, n)
		}
		leave(s, 1)
		if i == 0 { // from now on nothing can be opened
			if err := os.RemoveAll(filepath.Join(dir, "b", "tokenizer_config.json")); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "b", "tokenizer.json"), []byte("no tokenizer"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestWorkersComeAndGoWhileRequestsFindTheirModel(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "a"})
	ctx, cancel := context.WithCancel(t.Context())
	var running, looking sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	stop := make(chan struct{})
	for range 2 {
		looking.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				for i := range 6 {
					m, _ := s.Of(fmt.Sprint("model ", i))
					if d, err := m.Router.Route(ctx, router.Request{NumTokens: 3}); err == nil {
						d.Booking.End()
					}
				}
				s.Samples()
				s.Loads()
				s.Targets()
				s.CordonDiscovered(2, true)
				s.CordonDiscovered(2, false)
			}
		})
	}
	var workers sync.WaitGroup
	for worker := range uint64(6) {
		workers.Go(func() {
			for i := range 60 {
				name := fmt.Sprint("model ", (int(worker)+i)%40)
				if _, err := s.Join(worker, serves("", name)); err != nil {
					t.Error(err)
					return
				}
				s.Up(kv.Target{Key: kv.WorkerKey{Worker: worker}, Generation: i + 1, Models: []string{name}})
				s.Load(kv.WorkerKey{Worker: worker}, policy.Published{})
				leave(s, worker)
			}
		})
	}
	workers.Wait()
	close(stop)
	looking.Wait()
	cancel()
	running.Wait()
	for _, m := range s.All() {
		if err := m.Router.Check(); err != nil {
			t.Errorf("%q: %v", m.Name, err)
		}
		if n := m.Router.Count(); n != 0 {
			t.Errorf("%q still has %d workers", m.Name, n)
		}
	}
}

func TestModelsDirMustBeAFolder(t *testing.T) {
	if err := (models.Flags{ModelsDir: filepath.Join(t.TempDir(), "none")}).CheckDir(); err == nil || !strings.Contains(err.Error(), "--models-dir") {
		t.Errorf("%v", err)
	}
	if err := (models.Flags{ModelsDir: t.TempDir()}).CheckDir(); err != nil {
		t.Error(err)
	}
}

// TestRequestsWaitForTheModelThatComes: a model is told by its first worker only, so
// those that come before it wait for whoever it may be.
func TestRequestsWaitForTheModelThatComes(t *testing.T) {
	const other = "other"
	type found struct {
		model *models.Model
		known bool
		err   error
	}
	for _, test := range []struct {
		name   string
		before func(*models.Set)
		need   string
		comes  kv.Served
		known  bool
		want   string // the model's name
	}{
		{"for the default one", nil, "main", serves("", "main"), true, "main"},
		{"for one that nobody knew", nil, other, serves("", other), true, other},
		{"for one that did not come", nil, "third", serves("", other), false, "main"},
		{"for one that was there", func(s *models.Set) { join(t, s, 9, serves("", other)); leave(s, 9) }, other, serves("", other), true, other},
		{"for one whose blocks have another size now", func(s *models.Set) { join(t, s, 9, serves("", other)); leave(s, 9) }, other, serves("", other), true, other},
		{"by a name that is the first now", func(s *models.Set) { join(t, s, 9, serves("", other, "alias")); leave(s, 9) }, "alias", serves("", "alias", other), true, "alias"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSet(t, models.Settings{ServedModelName: "main"}, func(k *router.Settings) { k.HoldWhenEmpty = time.Minute })
			if test.before != nil {
				test.before(s)
			}
			ended := make(chan found, 1)
			go func() {
				m, known, err := s.Find(t.Context(), router.Need{Model: test.need})
				ended <- found{m, known, err}
			}()
			testkit.Eventually(t, 10*time.Second, "the request waits", func() bool { return s.Waiting() == 1 })
			if !s.Ready() {
				t.Error("not ready, though requests are held")
			}
			join(t, s, 1, test.comes)
			select {
			case f := <-ended:
				if f.err != nil || f.known != test.known || f.model.Name != test.want {
					t.Errorf("model %q, known %v, %v; want %q, %v", f.model.Name, f.known, f.err, test.want, test.known)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("it still waits")
			}
		})
	}
}

func TestStopWaitingIsForEveryModel(t *testing.T) {
	s := newSet(t, models.Settings{ServedModelName: "main"}, func(k *router.Settings) { k.HoldWhenEmpty = time.Minute })
	join(t, s, 9, serves("", "other"))
	leave(s, 9)
	ended := make(chan error, 2)
	for _, name := range []string{"main", "other"} {
		go func() {
			_, _, err := s.Find(t.Context(), router.Need{Model: name})
			ended <- err
		}()
	}
	testkit.Eventually(t, 10*time.Second, "both wait", func() bool { return s.Waiting() == 2 })
	for _, one := range s.Samples() {
		if one.Waiting != 1 || one.Saturation != 1 {
			t.Errorf("model %s: %d wait, saturation %v", one.Name, one.Waiting, one.Saturation)
		}
	}
	s.StopWaiting()
	for range 2 {
		if err := <-ended; !errors.Is(err, router.ErrNoWorker) {
			t.Error(err)
		}
	}
}

// TestTheLogOfHostileNamesIsBounded, and names that are not used leave no model.
func TestTheLogOfHostileNamesIsBounded(t *testing.T) {
	var log testkit.LogBuffer
	settings := models.Settings{ServedModelName: "a", Flags: models.Flags{ModelsDir: t.TempDir()}, BlockSize: testkit.BlockSize, TokenTimeout: time.Second, Policy: "round-robin", Scoring: testkit.Defaults[policies.Settings](), Index: testkit.Defaults[router.IndexSettings](), Routing: testkit.Defaults[router.Settings]()}
	index, _ := router.NewIndex(settings.Index, settings.Policy, settings.Scoring.Settings, settings.BlockSize, time.Now)
	s := models.New(settings, models.Deps{Router: router.New(settings.Routing, router.Deps{Index: index, Policy: policytest.MustPolicy(t, settings.Policy), BlockSize: settings.BlockSize}), Index: index, Log: slog.New(slog.NewTextHandler(&log, nil))})
	huge := strings.Repeat("x\x00\n", 1<<20)
	for i, of := range []kv.Served{serves(huge, "b"), serves("", huge), serves("", "\x00../\n")} {
		_, err := s.Join(uint64(i), of)
		if i == 1 && (err == nil || len(err.Error()) > 200) || i != 1 && err != nil {
			t.Errorf("join %d: %.300v", i, err)
		}
	}
	if n := len(s.All()); n != 3 {
		t.Errorf("%d models", n)
	}
	if text := log.String(); len(text) > 4000 || strings.ContainsRune(text, 0) {
		t.Errorf("the log has %d bytes: %.500q", len(text), text)
	}
}
