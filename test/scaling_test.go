package test

import (
	"context"
	"fmt"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

// scaled is a router without workers, and the file that tells it of some.
type scaled struct {
	*Router
	mocks *Workers
	file  *workersFile
}

// startAtZero starts a router over workers that it does not know yet.
func startAtZero(t *testing.T, mocks *Workers, args ...string) scaled {
	t.Helper()
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	file.write()
	return scaled{Start(t, append([]string{"--engine=none", "--discovery=file:" + file.path}, args...)...), mocks, file}
}

// entry is worker i in the file.
func (s scaled) entry(i int, more string) string {
	return fmt.Sprintf("{name: w%d, url: %q%s}", i, s.mocks.URL(i), more)
}

// held waits until so many requests are held.
func (s scaled) held(n int) {
	s.T.Helper()
	testkit.Eventually(s.T, 20*time.Second, fmt.Sprintf("%d requests are held", n), func() bool {
		return s.Metrics()["kvrouter_held_requests"] == float64(n)
	})
}

func TestRequestsWaitForTheFirstWorker(t *testing.T) {
	t.Parallel()
	const requests, leave = 100, 10
	s := startAtZero(t, StartWorkers(t, 2), "--hold-when-empty=1m")
	ctx, left := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var mu sync.Mutex
	answered, gone := map[uint64]int{}, 0
	for i := range requests {
		running.Go(func() {
			c := t.Context()
			if i < leave {
				c = ctx
			}
			a, err := s.Chat(c, Say(fmt.Sprintf("%d asks %s", i, strings.Repeat("and ", 50))), i%2 == 0, 30)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case i < leave && err != nil:
				gone++
			case err != nil || !a.Finished || a.Broken:
				t.Errorf("request %d: %+v, %v", i, a, err)
			default:
				answered[a.Worker]++
			}
		})
	}
	s.held(requests)
	if status, _ := testkit.HTTPGet(t, s.OpenAI+"/ready"); status != http.StatusOK {
		t.Errorf("/ready is %d while requests are held", status)
	}
	left()
	s.held(requests - leave)
	s.file.write(s.entry(0, ""), s.entry(1, ""))
	running.Wait()
	served := 0 // by the worker that is up first, or by both
	for _, n := range answered {
		served += n
	}
	if gone != leave || served != requests-leave {
		t.Errorf("%d left; answers by worker: %v", gone, answered)
	}
	s.held(0)
	if n := s.Metrics()[`kvrouter_prompt_source_total{source="none"}`]; n > 0 {
		t.Errorf("%v prompts have no tokens: they were asked for before a worker was up", n)
	}
	testkit.Eventually(t, 5*time.Second, "nothing is booked", func() bool { return s.InFlight() == 0 })

	s.file.write() // back to zero, and up again
	s.wantLifecycles()
	done := make(chan error, 1)
	go func() {
		_, err := s.Chat(t.Context(), Say("again"), false, 2)
		done <- err
	}()
	s.held(1)
	s.file.write(s.entry(0, ""))
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestHeldRequestsThatAreRefused(t *testing.T) {
	t.Parallel()
	mocks := StartWorkers(t, 1)
	refused := func(t *testing.T, s scaled) {
		t.Helper()
		response, err := http.Post(s.OpenAI+testkit.ChatPath, "application/json", strings.NewReader(`{"messages":[{"role":"user","content":"Hi"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
			t.Errorf("%s, Retry-After %q", response.Status, response.Header.Get("Retry-After"))
		}
	}
	t.Run("nothing is held unless told", func(t *testing.T) {
		s := startAtZero(t, mocks)
		refused(t, s)
		if status, _ := testkit.HTTPGet(t, s.OpenAI+"/ready"); status != http.StatusServiceUnavailable {
			t.Errorf("/ready is %d", status)
		}
	})
	t.Run("the time is over", func(t *testing.T) {
		s := startAtZero(t, mocks, "--hold-when-empty=200ms")
		began := time.Now()
		refused(t, s)
		if took := time.Since(began); took < 200*time.Millisecond {
			t.Errorf("after %s", took)
		}
	})
	t.Run("too many wait, or the router ends", func(t *testing.T) {
		s := startAtZero(t, mocks, "--hold-when-empty=1m", "--router-queue-limit=1", "--drain-delay=2s")
		var waits sync.WaitGroup
		waits.Go(func() { refused(t, s) })
		s.held(1)
		refused(t, s)
		s.held(1)
		s.signal(syscall.SIGTERM)
		waits.Wait()
		refused(t, s)
		if status, _ := testkit.HTTPGet(t, s.OpenAI+"/ready"); status != http.StatusServiceUnavailable {
			t.Errorf("/ready is %d while the router drains", status)
		}
		if code := s.WaitEnd(20 * time.Second); code != 0 {
			t.Errorf("exit code %d", code)
		}
	})
	t.Run("one that asks for a decision, or names its worker", func(t *testing.T) {
		s := startAtZero(t, mocks, "--hold-when-empty=1m")
		for _, nvext := range []string{`{"annotations":["query_instance_id:"]}`, `{"backend_instance_id":1}`} {
			if status, answer := Post(t, s.OpenAI+testkit.ChatPath, `{"messages":[],"nvext":`+nvext+`}`); status != http.StatusServiceUnavailable {
				t.Errorf("%s: %d %s", nvext, status, answer)
			}
		}
	})
}

// TestHeldRequestsWaitForBothWorkersOfAPair: a prefill worker alone serves nobody.
func TestHeldRequestsWaitForBothWorkersOfAPair(t *testing.T) {
	t.Parallel()
	s := startAtZero(t, StartWorkers(t, 2, "--prefill-workers=1", "--decode-workers=1", "--mock=disagg-kind=nixl"), "--hold-when-empty=1m", "--enforce-disagg")
	done := make(chan Answer, 1)
	go func() {
		a, err := s.Chat(t.Context(), LongPrompt(1), true, 8)
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	s.held(1)
	s.file.write(s.entry(0, ", role: prefill, kind: nixl"))
	s.wantLifecycles("w0 " + selection.LifecycleSchedulable)
	s.held(1)
	s.file.write(s.entry(0, ", role: prefill, kind: nixl"), s.entry(1, ", role: decode, kind: nixl"))
	if a := <-done; !a.Finished || a.Prefill == "" {
		t.Errorf("%+v", a)
	}
}

// saturation is that of the metrics page.
func (s *Mocks) saturation(t *testing.T) float64 {
	t.Helper()
	_, page := testkit.HTTPGet(t, s.OpenAI+"/metrics")
	value, there := testkit.ReadMetricsPage(string(page))["kvrouter_saturation"]
	if !there {
		t.Fatal("the page has no kvrouter_saturation")
	}
	return value
}

// TestSaturationPredictsTheWait compares it with how long first tokens took, under more
// load than the workers bear: of prompts that take long to compute, and of answers that
// fill the batch.
func TestSaturationPredictsTheWait(t *testing.T) {
	for name, test := range map[string]struct {
		flags          []string
		prompt, output int // tokens
	}{
		"prompts": {[]string{"--policy=least-loaded"}, 8000, 2},
		"batch":   {[]string{"--policy=work", "--mock=max-num-seqs=2"}, 100, 80},
	} {
		t.Run(name, func(t *testing.T) {
			flags := append(test.flags, "--speedup-ratio=1")
			s := StartOverAt(t, PlainProgram, testkit.FreePorts(t, 2), StartWorkers(t, 2, flags...), flags...)
			if idle := s.saturation(t); idle != 0 {
				t.Errorf("idle: %v", idle)
			}
			ask := func(i int) (first time.Duration) {
				tokens := strings.Repeat(fmt.Sprintf("%d,", 100+i), test.prompt-1) + "7"
				body := fmt.Sprintf(`{"prompt":[%s],"max_tokens":%d,"ignore_eos":true,"stream":true}`, tokens, test.output)
				began := time.Now()
				response, err := http.Post(s.OpenAI+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return 0
				}
				defer response.Body.Close()
				buffer := make([]byte, 1<<10)
				for {
					n, err := response.Body.Read(buffer)
					if first == 0 && n > 0 {
						first = time.Since(began)
					}
					if err != nil {
						return first
					}
				}
			}
			alone := ask(0)
			var mu sync.Mutex
			var running sync.WaitGroup
			var predicted, took, missed, highest float64
			const requests = 40
			for i := range requests {
				saturation := s.saturation(t)
				highest = max(highest, saturation)
				running.Go(func() {
					wait := max(0, (ask(1+i) - alone).Seconds())
					mu.Lock()
					defer mu.Unlock()
					predicted, took, missed = predicted+saturation, took+wait, missed+max(saturation-wait, wait-saturation)
				})
				<-time.After(20 * time.Millisecond)
			}
			running.Wait()
			t.Logf("mean wait %.2f s, predicted %.2f s; a prediction is off by %.2f s in the mean (%.0f %%); highest saturation %.1f", took/requests, predicted/requests, missed/requests, 100*missed/took, highest)
			testkit.Eventually(t, 20*time.Second, "idle again", func() bool { return s.saturation(t) == 0 })
			if took/requests < 0.5 {
				t.Skip("this machine is too busy to send more than simulated workers bear")
			}
			if highest < 0.5 || missed > took {
				t.Errorf("saturation rose to %.2f only, or predicts nothing", highest)
			}
		})
	}
}

// TestTheScaledObjectAsksForWhatRoutersShow holds deploy/keda/scaledobject.yaml against
// the metrics page.
func TestTheScaledObjectAsksForWhatRoutersShow(t *testing.T) {
	t.Parallel()
	type trigger struct {
		Type     string
		Metadata map[string]string
	}
	var object struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		Spec       struct {
			ScaleTargetRef  struct{ Kind, Name string } `yaml:"scaleTargetRef"`
			MinReplicaCount *int                        `yaml:"minReplicaCount"`
			MaxReplicaCount int                         `yaml:"maxReplicaCount"`
			CooldownPeriod  int                         `yaml:"cooldownPeriod"`
			Triggers        []trigger
		}
	}
	if err := yaml.Unmarshal([]byte(readText(t, "deploy/keda/scaledobject.yaml")), &object); err != nil {
		t.Fatal(err)
	}
	spec := object.Spec
	for _, trigger := range spec.Triggers {
		if trigger.Metadata["ignoreNullValues"] != "false" {
			t.Errorf("%v: no answer of Prometheus would take workers away", trigger)
		}
	}
	if object.APIVersion != "keda.sh/v1alpha1" || object.Kind != "ScaledObject" || spec.ScaleTargetRef.Name == "" || spec.MinReplicaCount == nil || *spec.MinReplicaCount != 0 || spec.MaxReplicaCount < 2 || spec.CooldownPeriod < 60 {
		t.Errorf("%+v", object)
	}
	s := StartMocks(t, 1)
	if _, err := s.Chat(t.Context(), Say("Hi"), false, 2); err != nil {
		t.Fatal(err)
	}
	page := string(s.Get(s.OpenAI + "/metrics"))
	asked := ""
	for i, trigger := range spec.Triggers {
		query := trigger.Metadata["query"]
		if trigger.Type != "prometheus" || trigger.Metadata["serverAddress"] == "" || trigger.Metadata["threshold"] == "" {
			t.Errorf("trigger %d: %+v", i, trigger)
		}
		for _, name := range regexp.MustCompile(`kvrouter_[a-z_]+`).FindAllString(query, -1) {
			if !strings.Contains(page, "\n"+name) {
				t.Errorf("%s: no router shows %s", query, name)
			}
		}
		asked += query
	}
	for _, name := range []string{"kvrouter_saturation", "kvrouter_held_requests"} {
		if !strings.Contains(asked, name) {
			t.Errorf("no trigger asks for %s", name)
		}
	}
	if document := readText(t, "docs/scaling.md"); !strings.Contains(document, "deploy/keda/scaledobject.yaml") {
		t.Error("docs/scaling.md does not name it")
	}
}

// readText reads a file of the checkout.
func readText(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
