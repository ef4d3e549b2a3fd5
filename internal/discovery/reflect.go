package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// apiLimit is the longest wait for a list. A watch lasts; a connection that is dead ends
// it by HTTP/2's pings.
const apiLimit = 30 * time.Second

// reflect keeps store at what the API server has of a resource, until ctx ends: client-go
// lists, watches, and lists again after a gap (410), with pauses that grow.
func (k *kubeSource) reflect(ctx context.Context, resource schema.GroupVersionResource, narrow listOptions, store cache.ReflectorStore) {
	at := k.client.Resource(resource).Namespace(k.namespace)
	health := &apiHealth{k: k, resource: resource, now: map[string]string{}}
	ways := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			ctx, cancel := context.WithTimeout(ctx, apiLimit)
			defer cancel()
			narrow(&options)
			list, err := at.List(ctx, options)
			health.heard(ctx, "list", options, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			narrow(&options)
			changes, err := at.Watch(ctx, options)
			health.heard(ctx, "watch", options, err)
			return changes, err
		},
	}
	var silent klog.Logger // what matters is told here
	reflector := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(ways, k.client), &unstructured.Unstructured{}, store, cache.ReflectorOptions{Logger: &silent, Name: resource.Resource, Backoff: &k.backoff})
	reflector.RunWithContext(klog.NewContext(ctx, silent))
}

// apiHealth tells people whether the API server answers.
type apiHealth struct {
	k        *kubeSource
	resource schema.GroupVersionResource

	mu  sync.Mutex        // guards now
	now map[string]string // what is wrong, by verb
}

// heard notes how a question ended.
func (h *apiHealth) heard(ctx context.Context, verb string, options metav1.ListOptions, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err == nil:
		before := len(h.now)
		if delete(h.now, "list"); verb == "watch" { // which begins where a list is known
			clear(h.now)
		}
		if before > 0 && len(h.now) == 0 {
			h.k.log.Info("--discovery kubernetes: the API server answers again", "resource", h.resource.Resource)
		}
	case errors.Is(context.Cause(ctx), context.Canceled): // nobody asks any more
	case apierrors.IsResourceExpired(err), apierrors.IsGone(err): // all is listed anew
	case options.SendInitialEvents != nil && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)): // an older server: it is asked for a list
	default:
		text := h.k.plainAPI(err, h.resource).Error()
		if !slices.Contains(slices.Collect(maps.Values(h.now)), text) {
			h.k.log.Warn("--discovery kubernetes: "+text+"; "+keptAsKnown, "resource", h.resource.Resource)
		}
		h.now[verb] = text
	}
}

// podSet is the Pods of a selection, as a reflector's store.
type podSet struct {
	k *kubeSource
	selection
	end  context.CancelFunc
	pods map[string]pod // by namespace and name; nil: not known yet. Guarded by k.mu
}

// follow keeps the Pods up to date until ctx ends.
func (s *podSet) follow(ctx context.Context) {
	s.k.reflect(ctx, podResource, func(o *metav1.ListOptions) { o.LabelSelector = s.selector }, s)
}

// change changes the Pods, and has them looked at.
func (s *podSet) change(change func()) error {
	s.k.mu.Lock()
	change()
	s.k.mu.Unlock()
	s.k.wake()
	return nil
}

// Add takes in a Pod.
func (s *podSet) Add(object any) error {
	u, is := object.(*unstructured.Unstructured)
	if !is {
		return fmt.Errorf("%T is no Pod", object)
	}
	return s.change(func() {
		if s.pods == nil {
			s.pods = map[string]pod{}
		}
		p := podOf(u)
		s.pods[p.namespace+"/"+p.name] = p
	})
}

// Update takes in a Pod that has changed.
func (s *podSet) Update(object any) error { return s.Add(object) }

// Delete takes a Pod out.
func (s *podSet) Delete(object any) error {
	u, is := object.(*unstructured.Unstructured)
	if !is {
		return fmt.Errorf("%T is no Pod", object)
	}
	return s.change(func() { delete(s.pods, u.GetNamespace()+"/"+u.GetName()) })
}

// Replace takes in all Pods anew.
func (s *podSet) Replace(objects []any, _ string) error {
	pods := make(map[string]pod, len(objects))
	for _, object := range objects {
		if u, is := object.(*unstructured.Unstructured); is {
			p := podOf(u)
			pods[p.namespace+"/"+p.name] = p
		}
	}
	return s.change(func() { s.pods = pods })
}

// Resync does nothing: nothing gets lost.
func (s *podSet) Resync() error { return nil }

// poolStore is the one pool that is asked for, as a reflector's store.
type poolStore struct {
	k       *kubeSource
	trouble trouble
}

// followPool keeps the pool up to date until ctx ends.
func (k *kubeSource) followPool(ctx context.Context) {
	store := &poolStore{k, trouble{log: k.log, what: "--discovery kubernetes"}}
	name := fields.OneTermEqualSelector("metadata.name", k.settings.Pool).String()
	k.reflect(ctx, poolResource, func(o *metav1.ListOptions) { o.FieldSelector = name }, store)
}

// missing says that there is no such pool. What is known of it stays: its workers are
// there.
func (s *poolStore) missing() error {
	s.trouble.is(fmt.Errorf("there is no InferencePool %s in namespace %s", s.k.settings.Pool, s.k.namespace), keptAsKnown)
	return nil
}

// Add takes in the pool.
func (s *poolStore) Add(object any) error {
	u, is := object.(*unstructured.Unstructured)
	if !is || u.GetName() != s.k.settings.Pool {
		return nil
	}
	p, err := poolOf(u)
	if err != nil {
		s.trouble.is(err, keptAsKnown)
		return nil
	}
	s.trouble.over()
	s.k.mu.Lock()
	s.k.pool = &p
	s.k.mu.Unlock()
	s.k.wake()
	return nil
}

// Update takes in the pool after a change.
func (s *poolStore) Update(object any) error { return s.Add(object) }

// Delete notes that the pool has gone.
func (s *poolStore) Delete(object any) error {
	if u, is := object.(*unstructured.Unstructured); is && u.GetName() == s.k.settings.Pool {
		return s.missing()
	}
	return nil
}

// Replace takes in the pool, or that there is none.
func (s *poolStore) Replace(objects []any, _ string) error {
	for _, object := range objects {
		if u, is := object.(*unstructured.Unstructured); is && u.GetName() == s.k.settings.Pool {
			return s.Add(u)
		}
	}
	return s.missing()
}

// Resync does nothing: nothing gets lost.
func (s *poolStore) Resync() error { return nil }
