package kubernetes

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubernetes"
	"kvrouter/internal/tools/mocker"
	"kvrouter/test"
)

const (
	kubeNamespace = "vllm"
	kubeClients   = 140 // each with one request in flight, or on its way
	kubeTokens    = 40  // of an answer, which takes 2 s
	kubeLeast     = 100 // requests that are in flight at the router at any moment
	// kubeSlack is how long after the kubelet has heard of a deletionTimestamp a request
	// may still come to that Pod: the router hears of it by a watch of its own, and a
	// request that was sent before is on its way. All of it shares two cores with other
	// tests. A router that ignores deletionTimestamps sends until the end of preStop, 1 s.
	kubeSlack = 500 * time.Millisecond
	// kubeLimit bounds the wait for a rollout.
	kubeLimit = 90 * time.Second
)

var deploymentResource = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}

// kubeSite is a control plane, a Node of mock workers, and a router.
type kubeSite struct {
	*test.Router
	t       *testing.T
	cluster *kubernetes.Cluster
	kubelet *kubernetes.Kubelet
	port    int // of each worker
}

// startKube starts a control plane with the namespace and the router's ServiceAccount,
// which has the Role that docs/discovery.md shows.
func startKube(t *testing.T) *kubeSite {
	t.Helper()
	k := &kubeSite{t: t, cluster: kubernetes.Start(t), port: testkit.FreePorts(t, 4)}
	k.cluster.Create("{apiVersion: v1, kind: Namespace, metadata: {name: vllm}}")
	k.cluster.Create(documentedRole(t))
	k.account("kvrouter", "kvrouter")
	return k
}

// documentedRole is the Role of docs/discovery.md, as YAML.
func documentedRole(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("docs/discovery.md")
	if err != nil {
		t.Fatal(err)
	}
	for block := range strings.SplitSeq(string(page), "```yaml\n") {
		if block, _, _ = strings.Cut(block, "```"); strings.HasPrefix(block, "kind: Role\n") {
			return block
		}
	}
	t.Fatal("docs/discovery.md shows no Role")
	return ""
}

// account makes a ServiceAccount that has a Role.
func (k *kubeSite) account(name, role string) {
	k.t.Helper()
	k.cluster.Create(fmt.Sprintf(`{apiVersion: v1, kind: ServiceAccount, metadata: {name: %s, namespace: vllm}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: %[1]s, namespace: vllm}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: %s}
subjects: [{kind: ServiceAccount, name: %[1]s, namespace: vllm}]
`, name, role))
}

// nodes starts the controllers, and a Node whose workers start so.
func (k *kubeSite) nodes(start kubernetes.Starter) {
	k.t.Helper()
	k.cluster.StartControllers()
	k.kubelet = kubernetes.StartKubelet(k.t, k.cluster, start)
}

// deploy makes a Deployment of workers that serve a model, with labels app=vllm and
// model=NAME. preStop is the pause, in seconds, between a Pod's deletionTimestamp and
// its worker's SIGTERM. env are more entries of the worker's environment, as YAML.
func (k *kubeSite) deploy(model string, replicas, preStop int, env ...string) {
	k.t.Helper()
	k.cluster.Create(fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: %s, namespace: vllm}
spec:
  replicas: %d
  selector: {matchLabels: {model: %[1]s}}
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 1}}
  template:
    metadata: {labels: {app: vllm, model: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 30
      containers:
        - name: worker
          image: mock
          env: [{name: %[3]s, value: %[1]s}, {name: %[4]s, value: "%[5]d"}%[7]s]
          lifecycle: {preStop: {sleep: {seconds: %[6]d}}}
`, model, replicas, kubernetes.EnvModel, kubernetes.EnvPort, k.port, preStop, strings.Join(append([]string{""}, env...), ", ")))
}

// change patches a Deployment.
func (k *kubeSite) change(name, patch string) {
	k.t.Helper()
	k.cluster.Patch(deploymentResource, kubeNamespace, name, patch)
}

// rollOut has a Deployment replace its Pods, one after the other.
func (k *kubeSite) rollOut(name string) {
	k.t.Helper()
	k.change(name, `{"spec":{"template":{"metadata":{"annotations":{"release":"2"}}}}}`)
}

// route starts kvrouter as a ServiceAccount, over the Pods with label app=vllm unless args
// name others.
func (k *kubeSite) route(account string, args ...string) {
	k.t.Helper()
	if !slices.ContainsFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "--pool") }) {
		args = append(args, "--selector=app=vllm", fmt.Sprintf("--worker-port=%d", k.port))
	}
	env := []string{"KUBECONFIG=" + k.cluster.Kubeconfig(kubeNamespace, k.cluster.Token(kubeNamespace, account)), "KUBERNETES_SERVICE_HOST="}
	k.Router = test.StartAt(k.t, test.PlainProgram, testkit.FreePorts(k.t, 2), env, append([]string{"--log-level=info", "--engine=none", "--discovery=kubernetes"}, args...)...)
}

// schedulable waits until the router has so many workers, all of which get requests.
func (k *kubeSite) schedulable(workers int) {
	k.t.Helper()
	testkit.Eventually(k.t, kubeLimit, fmt.Sprintf("%d workers, all schedulable", workers), func() bool {
		all := k.Workers()
		return len(all) == workers && !slices.ContainsFunc(all, func(w selection.WorkerRecord) bool { return w.Lifecycle != selection.LifecycleSchedulable })
	})
}

// gone waits until so many Pods have gone since the start, and returns all of them.
func (k *kubeSite) gone(pods int) []kubernetes.Ended {
	k.t.Helper()
	testkit.Eventually(k.t, kubeLimit, fmt.Sprintf("%d Pods have gone", pods), func() bool { return len(k.kubelet.Ended()) >= pods })
	return k.kubelet.Ended()
}

// says waits for a line of the router's log.
func (k *kubeSite) says(text string) {
	k.t.Helper()
	testkit.Eventually(k.t, kubeLimit, "the log says: "+text, func() bool { return strings.Contains(k.Log.String(), text) })
}

// load is clients that stream one answer after the other, and what became of that.
type load struct {
	t        *testing.T
	s        *test.Router
	stop     context.CancelFunc // the clients' last answers may end
	clients  sync.WaitGroup
	answered atomic.Int64 // whole

	mu    sync.Mutex // guards the rest
	lost  []string
	least int // requests in flight at the router, of all looks
	looks int
}

// ask starts the clients, and waits until they have had two answers each: from then on
// each has one in flight, until finish.
func (k *kubeSite) ask() *load {
	k.t.Helper()
	ctx, stop := context.WithCancel(k.t.Context())
	l := &load{t: k.t, s: k.Router, stop: stop, least: kubeClients}
	for i := range kubeClients {
		l.clients.Go(func() {
			tokens := 1 + i*kubeTokens/kubeClients // first, so that they do not all end at once
			for n := 0; ctx.Err() == nil; n++ {
				a, err := l.s.Chat(k.t.Context(), test.Say(fmt.Sprintf("client %d asks %d", i, n), "so", "and so on"), true, tokens)
				if err == nil && a.Finished && !a.Broken && len(a.Text) == tokens {
					l.answered.Add(1)
				} else {
					l.mu.Lock()
					l.lost = append(l.lost, fmt.Sprintf("client %d, request %d: %d of %d tokens, finished %v, broken %v, %v", i, n, len(a.Text), tokens, a.Finished, a.Broken, err))
					l.mu.Unlock()
				}
				tokens = kubeTokens
			}
		})
	}
	k.t.Cleanup(l.end)
	l.more(2 * kubeClients) // each has begun one of full length
	l.clients.Go(func() {   // looks at them until stop
		for every := time.NewTicker(200 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				every.Stop()
				return
			case <-every.C:
			}
			if n := l.inFlight(); n >= 0 && ctx.Err() == nil {
				l.mu.Lock()
				l.least = min(l.least, n)
				l.looks++
				l.mu.Unlock()
			}
		}
	})
	return l
}

// inFlight is how many requests the router has sent to workers; below 0: it does not say.
func (l *load) inFlight() int {
	all := l.s.Workers()
	if all == nil {
		return -1
	}
	n := 0
	for _, w := range all {
		n += w.InFlight
	}
	return n
}

// more waits until so many more answers have ended.
func (l *load) more(answers int64) {
	l.t.Helper()
	before := l.answered.Load()
	testkit.Eventually(l.t, kubeLimit, fmt.Sprintf("%d more answers", answers), func() bool { return l.answered.Load() >= before+answers })
}

// end has the clients end.
func (l *load) end() {
	l.stop()
	l.clients.Wait()
	http.DefaultClient.CloseIdleConnections()
}

// finish ends the clients and holds that no answer was lost, and that the router was as
// busy all the time as the test means it to be.
func (l *load) finish() {
	l.t.Helper()
	l.end()
	l.t.Logf("%d lost of %d requests; in %d looks at the router at least %d were in flight", len(l.lost), l.answered.Load()+int64(len(l.lost)), l.looks, l.least)
	for _, one := range l.lost[:min(len(l.lost), 10)] {
		l.t.Error(one)
	}
	if l.least < kubeLeast || l.looks < 20 {
		l.t.Errorf("in %d looks at least %d requests were in flight, want %d at each of 20 or more", l.looks, l.least, kubeLeast)
	}
}

// wellEnded holds that Pods have ended without a cut answer, and that nothing new came
// once the router could know that they are to end: what happened before watching it
// heard then. Each was busy, so that this says something.
func wellEnded(t *testing.T, pods []kubernetes.Ended, watching time.Time) {
	t.Helper()
	for _, p := range pods {
		known := p.Told
		if known.Before(watching) {
			known = watching
		}
		late := p.Last.Sub(known)
		t.Logf("%s: %d requests by POST, the last %.0f ms after its deletionTimestamp could be known; SIGTERM %.0f ms after that, with %d answers to give",
			p.Name, p.Posts, float64(late)/1e6, float64(p.Stopped.Sub(p.Told))/1e6, p.Running)
		if late > kubeSlack {
			t.Errorf("%s got a new request %s after its deletionTimestamp", p.Name, late)
		}
		if p.Aborted > 0 || p.Stopped.IsZero() {
			t.Errorf("%s: %d answers were cut; told to end: %v", p.Name, p.Aborted, !p.Stopped.IsZero())
		}
		if p.Posts < 5 {
			t.Errorf("%s: only %d requests came before", p.Name, p.Posts)
		}
	}
}

// tokensAt returns the number of tokens and the tokens that POST /tokenize gives.
func tokensAt(t *testing.T, url string, body []byte) string {
	t.Helper()
	_, answer := test.Post(t, url+"/tokenize", string(body))
	return fmt.Sprint(gjson.GetBytes(answer, "count").Int(), " ", gjson.GetBytes(answer, "tokens").Raw)
}

// asked sends a chat; predicted are the tokens of overlap that the router names.
func asked(t *testing.T, url string, body []byte) (answer gjson.Result, predicted int64) {
	t.Helper()
	response, err := http.Post(url+testkit.ChatPath, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if predicted, err = strconv.ParseInt(response.Header.Get(web.HeaderOverlap), 10, 64); err != nil {
		t.Fatalf("%s: %s", response.Status, text)
	}
	return gjson.ParseBytes(text), predicted
}

// TestKubernetesScalingLosesNothing: 2 workers, then 6, then 2, while 100 requests are in
// flight. The workers get their SIGTERM with the deletionTimestamp, in the middle of
// their answers.
func TestKubernetesScalingLosesNothing(t *testing.T) {
	k := startKube(t)
	k.nodes(kubernetes.Apart("TestMockPod"))
	k.deploy("mock", 2, 0)
	k.route("kvrouter")
	k.schedulable(2)
	l := k.ask()

	k.change("mock", `{"spec":{"replicas":6}}`)
	k.schedulable(6)
	l.more(4 * kubeClients) // the new ones have their share by then

	k.change("mock", `{"spec":{"replicas":2}}`)
	gone := k.gone(4)
	k.schedulable(2)
	l.more(2 * kubeClients)
	l.finish()
	wellEnded(t, gone, time.Time{})
	for _, p := range gone {
		if p.Running == 0 {
			t.Errorf("%s had no answer to give when it was told to end", p.Name)
		}
	}
}

// TestKubernetesRollingUpdateLosesNothing: all Pods are replaced. Each stays open for
// 2 s after its deletionTimestamp, as with a preStop pause: what the router sends there
// meanwhile would be taken.
func TestKubernetesRollingUpdateLosesNothing(t *testing.T) {
	const pods, preStop = 4, 2
	k := startKube(t)
	k.nodes(kubernetes.Apart("TestMockPod"))
	k.deploy("mock", pods, preStop)
	k.route("kvrouter")
	k.schedulable(pods)
	l := k.ask()

	k.rollOut("mock")
	gone := k.gone(pods)
	k.schedulable(pods)
	l.more(2 * kubeClients)
	l.finish()
	wellEnded(t, gone, time.Time{})
	for _, p := range gone {
		if open := p.Stopped.Sub(p.Told); open < preStop*time.Second {
			t.Errorf("%s was open for %s only after its deletionTimestamp", p.Name, open)
		}
	}
}

// TestKubernetesAPIServersDeathLosesNothing: it is killed in the middle of a rolling
// update and stays away for 30 s.
func TestKubernetesAPIServersDeathLosesNothing(t *testing.T) {
	const pods, away = 4, 30 * time.Second
	k := startKube(t)
	k.nodes(kubernetes.Apart("TestMockPod"))
	k.deploy("mock", pods, 1)
	k.route("kvrouter")
	k.schedulable(pods)
	l := k.ask()

	k.rollOut("mock")
	k.gone(1)
	k.cluster.KillAPI()
	killed, before := time.Now(), l.answered.Load()
	k.says("the API server does not answer")
	back := time.NewTimer(away - time.Since(killed))
	<-back.C
	meanwhile := l.answered.Load() - before
	if n := len(k.kubelet.Ended()); n >= pods {
		t.Errorf("%d Pods have gone: the server was away too late", n)
	}
	if meanwhile < 5*kubeClients {
		t.Errorf("%d answers while the API server was away", meanwhile)
	}
	k.cluster.StartAPI()
	began := time.Now()
	k.says("the API server is reachable again")
	watching := time.Now()
	k.cluster.StartControllers()
	gone := k.gone(pods)
	k.schedulable(pods)
	l.more(2 * kubeClients)
	t.Logf("%d answers while it was away for %s; the router knew it again %.1f s after it was ready", meanwhile, away, watching.Sub(began).Seconds())
	l.finish()
	wellEnded(t, gone, watching)
}

// TestKubernetesKeepsModelsApart: two Deployments serve a model each, behind one router:
// other tokenizers, other block sizes.
func TestKubernetesKeepsModelsApart(t *testing.T) {
	const requests = 30
	models := map[string]int{"alpha": 2, "beta": 3}       // replicas
	blockSizes := map[string]int{"alpha": 64, "beta": 16} // tokens
	dir := t.TempDir()
	testkit.TokenizerFolder(t, filepath.Join(dir, "alpha"), [2]string{"t", "h"}, [2]string{"th", "e"})
	testkit.TokenizerFolder(t, filepath.Join(dir, "beta"), [2]string{"o", "u"}, [2]string{"a", "n"}, [2]string{"an", "d"})
	k := startKube(t)
	k.nodes(kubernetes.Apart("TestMockPod"))
	for model, replicas := range models {
		k.deploy(model, replicas, 0, fmt.Sprintf("{name: %s, value: %q}", kubernetes.EnvFiles, filepath.Join(dir, model)), fmt.Sprintf("{name: %s, value: \"%d\"}", kubernetes.EnvBlock, blockSizes[model]))
	}
	// Workers are asked whether they take tokens by requests, which would count below.
	k.route("kvrouter", "--policy=kv", "--send-tokens=never", "--model="+filepath.Join(dir, "alpha"), "--models-dir="+dir)
	k.schedulable(5)
	_, list := testkit.HTTPGet(t, k.OpenAI+"/v1/models")
	var clients sync.WaitGroup
	for model := range models {
		if !strings.Contains(string(list), fmt.Sprintf("%q", model)) {
			t.Errorf("/v1/models has no %s: %s", model, list)
		}
		s := *k.Router
		s.Model = model
		for i := range requests {
			clients.Go(func() {
				if a, err := s.Chat(t.Context(), test.Say(fmt.Sprintf("%s, for the %d. time", model, i)), true, 5); err != nil || !a.Finished || a.Broken {
					t.Errorf("%s: %+v, %v", model, a, err)
				}
			})
		}
	}
	clients.Wait()
	http.DefaultClient.CloseIdleConnections()
	served := map[string]float64{}
	for _, p := range k.kubelet.Pods() {
		_, page := testkit.HTTPGet(t, fmt.Sprintf("http://%s:%d/metrics", p.Address, k.port))
		for name, value := range testkit.ReadMetricsPage(string(page)) {
			if strings.HasPrefix(name, "vllm:request_success_total") {
				model, _, _ := strings.Cut(p.Name, "-")
				served[model] += value
				if value > 0 && !strings.Contains(name, fmt.Sprintf("model_name=%q", model)) {
					t.Errorf("%s: %s", p.Name, name)
				}
			}
		}
	}
	for model := range models {
		if served[model] != requests {
			t.Errorf("%v answers by workers of %s, want %d", served[model], model, requests)
		}
	}
	text := strings.Repeat("the sound and the fury of you and the others ", 30)
	tokens, pods := map[string]string{}, k.kubelet.Pods()
	for model, size := range blockSizes {
		pod := pods[slices.IndexFunc(pods, func(p kubernetes.Pod) bool { return strings.HasPrefix(p.Name, model+"-") })]
		body := mocker.MustJSON(map[string]any{"model": model, "messages": test.Say(text), "max_tokens": 1})
		here, there := tokensAt(t, k.OpenAI, body), tokensAt(t, fmt.Sprintf("http://%s:%d", pod.Address, k.port), body)
		if tokens[model] = here; here != there {
			t.Errorf("%s: tokens %.60s here, %.60s at its worker", model, here, there)
		}
		// The first request finds nothing, though the other model was asked the same. Once its
		// blocks are known, a second one finds all full ones, short of the last token.
		var predicted, cached, prompt int64
		testkit.Eventually(t, kubeLimit, model+": its blocks are known", func() bool {
			var answer gjson.Result
			answer, predicted = asked(t, k.OpenAI, body)
			before := prompt
			prompt, cached = answer.Get("usage.prompt_tokens").Int(), answer.Get("usage.prompt_tokens_details.cached_tokens").Int()
			if before == 0 && (predicted != 0 || cached != 0) {
				t.Errorf("%s: %d tokens are predicted of a new prompt, %d are cached", model, predicted, cached)
			}
			return predicted > 0
		})
		if want := (prompt - 1) / int64(size) * int64(size); predicted != want || cached != want || !strings.HasPrefix(here, fmt.Sprintf("%d ", prompt)) {
			t.Errorf("%s: %d tokens are predicted, %d are cached of %d, want %d; tokens %.20s", model, predicted, cached, prompt, want, here)
		}
	}
	if tokens["alpha"] == tokens["beta"] {
		t.Error("both models have the same tokens: the test shows nothing")
	}
	s := *k.Router
	s.Model = "gamma"
	if _, err := s.Chat(t.Context(), test.Say("Hi"), false, 1); err == nil || !strings.HasPrefix(err.Error(), "404 ") {
		t.Errorf("a model that nobody serves: %v", err)
	}
}
