package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"kvrouter/internal/base/kv"
)

// Resources requested from the API server.
var (
	podResource   = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	poolResource  = schema.GroupVersionResource{Group: "inference.networking.k8s.io", Version: "v1", Resource: "inferencepools"}
	sliceResource = schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}
)

// namespaceFile has the namespace of the Pod that this process runs in.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// validateKubernetes checks the settings of --discovery kubernetes.
func (s Settings) validateKubernetes() error {
	if s.WorkerPort < 1 || s.WorkerPort > 65535 {
		return fmt.Errorf("--worker-port %d: must be 1 to 65535", s.WorkerPort)
	}
	selectors := 0
	for _, flag := range []struct{ name, value string }{{"--selector", s.Selector}, {"--prefill-selector", s.PrefillSelector},
		{"--decode-selector", s.DecodeSelector}} {
		if flag.value == "" {
			continue
		}
		selectors++
		if _, err := labels.Parse(flag.value); err != nil {
			return fmt.Errorf("%s %s: %w; give labels such as app=vllm,tier!=test", flag.name, flag.value, err)
		}
	}
	switch {
	case s.Pool == "" && selectors == 0:
		return errors.New("--discovery kubernetes: select the workers' Pods by --pool, or by --selector, --prefill-selector and " +
			"--decode-selector")
	case s.Pool != "" && selectors > 0:
		return fmt.Errorf("--pool %s selects the workers' Pods already: leave out --selector, --prefill-selector and --decode-selector", s.Pool)
	}
	return nil
}

// cluster is a namespace of a cluster. Reflectors of client-go follow the requested objects.
type cluster struct {
	client    dynamic.Interface
	idle      func() // closes idle connections
	namespace string
	backoff   wait.Backoff
	pace      rate.Limit // of requests about a resource
	what      string     // the flag and its source, for messages
	kept      string     // effect of an unreachable API server, for messages
	log       *slog.Logger
	changed   chan struct{} // has a token when there is something new
	crowded   bool          // more than allowed; already logged

	mu sync.Mutex // guards what reflectors store
}

// kubeSource finds workers in a cluster: what changes wakes the goroutine of Watch.
type kubeSource struct {
	*cluster
	settings Settings

	// The goroutine of Watch alone uses these.
	pool     *pool             // its last usable state; nil: none is known, or none is asked for
	problems map[string]string // logged problems of Pods, by name
}

// openKubernetes finds the cluster of --discovery kubernetes.
func openKubernetes(s Settings, log *slog.Logger) (*kubeSource, error) {
	config, namespace, err := findCluster(s.Namespace, "give --namespace")
	if err != nil {
		return nil, fmt.Errorf("--discovery kubernetes: %w", err)
	}
	return newKubernetes(s, config, namespace, log)
}

// findCluster finds the cluster that the router runs in, else that of the current
// context of KUBECONFIG. Without a namespace it is the router's own, or the context's;
// remedy says how to give one.
func findCluster(namespace, remedy string) (*rest.Config, string, error) {
	config, err := rest.InClusterConfig()
	if err == nil && namespace == "" {
		own, err := os.ReadFile(namespaceFile)
		if err != nil {
			return nil, "", fmt.Errorf("the router's own namespace is unknown (%w): %s", err, remedy)
		}
		namespace = strings.TrimSpace(string(own))
	}
	if errors.Is(err, rest.ErrNotInCluster) {
		file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(clientcmd.NewDefaultClientConfigLoadingRules(), nil)
		if config, err = file.ClientConfig(); err == nil && namespace == "" {
			namespace, _, err = file.Namespace()
		}
	}
	if err != nil {
		return nil, "", fmt.Errorf("no cluster: %w; run in a Pod with a ServiceAccount, or set KUBECONFIG", err)
	}
	config.UserAgent = "kvrouter"
	return config, namespace, nil
}

// newKubernetes is openKubernetes with a known cluster.
func newKubernetes(s Settings, config *rest.Config, namespace string, log *slog.Logger) (*kubeSource, error) {
	client, idle, err := connect(config, log)
	if err != nil {
		return nil, fmt.Errorf("--discovery kubernetes: %w", err)
	}
	k := newKubeSource(s, client, namespace, log)
	k.idle = idle
	return k, nil
}

// connect returns a client of the API server, and what closes its idle connections.
func connect(config *rest.Config, log *slog.Logger) (client dynamic.Interface, idle func(), err error) {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return boundedAPI{next, log} })
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, nil, err
	}
	client, err = dynamic.NewForConfigAndClient(config, web)
	return client, web.CloseIdleConnections, err
}

// newCluster returns a namespace over a client.
func newCluster(client dynamic.Interface, namespace, what, kept string, log *slog.Logger) *cluster {
	return &cluster{
		client: client, namespace: namespace, what: what, kept: kept, log: log, idle: func() {}, changed: make(chan struct{}, 1),
		// A router that was away for long is to know its workers soon after.
		backoff: wait.Backoff{Duration: 500 * time.Millisecond, Cap: 15 * time.Second, Steps: 100, Factor: 2, Jitter: 0.5},
		pace:    2, // client-go starts a watch that is answered with 410 anew at once
	}
}

// newKubeSource returns a source over a client.
func newKubeSource(s Settings, client dynamic.Interface, namespace string, log *slog.Logger) *kubeSource {
	return &kubeSource{cluster: newCluster(client, namespace, "--discovery kubernetes", workersKept, log), settings: s,
		problems: map[string]string{}}
}

// podSet is the Pods of a selection.
type podSet struct {
	selection
	end  context.CancelFunc
	pods *store[pod]
}

// selection is which Pods are workers, and by which name of a selector.
type selection struct {
	selector string
	role     *kv.Role // of all of them; nil: as marked
}

// selections are those of the flags, or of the pool.
func (k *kubeSource) selections() (all []selection) {
	if k.settings.Pool != "" {
		if k.pool != nil {
			all = append(all, selection{selector: labels.SelectorFromSet(k.pool.labels).String()})
		}
		return all
	}
	prefill, decode := kv.RolePrefill, kv.RoleDecode
	for _, s := range []selection{{k.settings.Selector, nil}, {k.settings.PrefillSelector, &prefill}, {k.settings.DecodeSelector, &decode}} {
		if s.selector != "" {
			all = append(all, s)
		}
	}
	return all
}

// takePool takes over the stored state of the pool. While it is missing or invalid, its
// last usable state counts.
func (k *kubeSource) takePool(pools *store[pool], unusable *trouble) {
	k.mu.Lock()
	known := pools.all != nil
	now, found := pools.all[k.settings.Pool]
	k.mu.Unlock()
	switch {
	case !known:
	case !found:
		unusable.is(fmt.Errorf("there is no InferencePool %s in namespace %s", k.settings.Pool, k.namespace), workersKept)
	case now.err != nil:
		unusable.is(now.err, workersKept)
	default:
		unusable.over()
		k.pool = &now
	}
}

// wake makes the waiting goroutine check for changes.
func (c *cluster) wake() {
	select {
	case c.changed <- struct{}{}:
	default: // it has a token
	}
}

// Watch sends the workers of the cluster.
func (k *kubeSource) Watch(ctx context.Context) <-chan []kv.Worker {
	return startWatch(ctx, func(send func([]kv.Worker) bool) {
		ctx, end := context.WithCancel(ctx)
		var reflectors sync.WaitGroup
		defer k.idle()
		defer reflectors.Wait()
		defer end()
		pools, unusable := newStore(k.cluster, poolOf), trouble{log: k.log, what: k.what}
		if k.settings.Pool != "" {
			name := fields.OneTermEqualSelector("metadata.name", k.settings.Pool).String()
			reflectors.Go(func() { k.reflect(ctx, poolResource, func(o *metav1.ListOptions) { o.FieldSelector = name }, pools) })
		}
		var sets []*podSet
		var last []kv.Worker
		sent := false
		for {
			k.takePool(pools, &unusable)
			if now := k.selections(); !sameSelections(sets, now) {
				for _, set := range sets {
					set.end()
				}
				sets = nil
				for _, s := range now {
					set := &podSet{selection: s, pods: newStore(k.cluster, podOf)}
					var follow context.Context
					follow, set.end = context.WithCancel(ctx)
					sets = append(sets, set)
					reflectors.Go(func() {
						k.reflect(follow, podResource, func(o *metav1.ListOptions) { o.LabelSelector = set.selector }, set.pods)
					})
				}
			}
			if list, known := k.workers(sets, last); known && (!sent || !slices.Equal(list, last)) {
				if !send(list) {
					return
				}
				last, sent = list, true
			}
			select {
			case <-ctx.Done():
				return
			case <-k.changed:
			}
		}
	})
}

func sameSelections(sets []*podSet, now []selection) bool {
	return slices.EqualFunc(sets, now, func(set *podSet, s selection) bool { return set.selector == s.selector })
}

// workers returns all workers, once all Pods are known: a part of them would look as if
// the others had gone. last is the previous list.
func (k *kubeSource) workers(sets []*podSet, last []kv.Worker) (list []kv.Worker, known bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(sets) == 0 || slices.ContainsFunc(sets, func(set *podSet) bool { return set.pods.all == nil }) {
		return nil, false
	}
	ports := []uint16{uint16(k.settings.WorkerPort)}
	if k.pool != nil {
		ports = k.pool.ports
	}
	byID, problems, roles := map[uint64]kv.Worker{}, map[string]string{}, map[string]kv.Role{}
	for _, set := range sets { // those with a role come last, and count
		for _, p := range set.pods.all {
			found, problem := p.workers(set.role, ports, k.pool != nil)
			if set.role != nil && len(found) > 0 {
				if before, ok := roles[p.name]; ok && before != *set.role {
					problem = fmt.Sprintf("it matches both --prefill-selector and --decode-selector: its role is %s", *set.role)
				}
				roles[p.name] = *set.role
			}
			if problem != "" {
				problems[p.name] = problem
			}
			for _, w := range found {
				byID[w.ID] = w
			}
		}
	}
	for name, problem := range problems {
		if k.problems[name] != problem {
			k.log.Warn(fmt.Sprintf("--discovery kubernetes: pod %s: %s", name, problem))
		}
	}
	k.problems = problems
	return k.bounded(byName(slices.Collect(maps.Values(byID))), last), true
}

// bounded is the list with maxWorkers of them at most: those already listed come
// first, since requests may run there.
func (k *kubeSource) bounded(list, last []kv.Worker) []kv.Worker {
	if len(list) <= maxWorkers {
		k.crowded = false
		return list
	}
	if !k.crowded {
		k.log.Warn("--discovery kubernetes: too many workers: the newest are not used", "workers", len(list), "most", maxWorkers)
		k.crowded = true
	}
	listed := map[uint64]int{}
	for _, w := range last {
		listed[w.ID] = 1
	}
	slices.SortStableFunc(list, func(a, b kv.Worker) int { return listed[b.ID] - listed[a.ID] })
	return byName(list[:maxWorkers])
}

// plainAPI is an error of the API server in words that stay the same from one attempt
// to the next, with what to do about it.
func (c *cluster) plainAPI(err error, resource schema.GroupVersionResource) error {
	var address *url.Error
	var unknown *net.DNSError
	var broken *net.OpError
	switch {
	case apierrors.IsForbidden(err):
		account := "the router's ServiceAccount"
		if _, user, found := strings.Cut(oneLine(err), `User "`); found {
			account, _, _ = strings.Cut(user, `"`)
		}
		return fmt.Errorf(`no right to list and watch %s in namespace %s: the Role of %s needs the rule `+
			`{apiGroups: ["%s"], resources: [%[1]s], verbs: [list, watch]}`, resource.Resource, c.namespace, account, resource.Group)
	case apierrors.IsUnauthorized(err):
		return errors.New("the API server rejects the credentials (401): the token or certificate is invalid")
	case apierrors.IsNotFound(err) && resource == poolResource:
		return errors.New("the cluster has no resource InferencePool (inference.networking.k8s.io/v1): install the Gateway API Inference " +
			"Extension, or use --selector instead of --pool")
	case errors.As(err, &unknown):
		return fmt.Errorf("the API server does not answer: %w", plain(err))
	case errors.As(err, &broken): // which names this end's port, another at each attempt
		return fmt.Errorf("the API server does not answer: %w", broken.Err)
	case errors.As(err, &address):
		return fmt.Errorf("the API server does not answer: %w", address.Err)
	}
	return errors.New(oneLine(err))
}

// oneLine bounds a server's message.
func oneLine(err error) string {
	const most = 300
	text := strings.Join(strings.Fields(err.Error()), " ")
	return text[:min(len(text), most)]
}
