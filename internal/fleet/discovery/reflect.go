package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// apiLimit is the longest wait for a list. A watch lasts; a connection that is dead ends
// it by HTTP/2's pings.
const apiLimit = 30 * time.Second

// apiBurst is the number of requests about a resource in a row without a pause.
const apiBurst = 10

// reflect keeps store equal to the API server's objects of a resource, until ctx ends: client-go
// lists, watches, and lists again after a gap (410), with pauses that grow.
func (c *cluster) reflect(ctx context.Context, resource schema.GroupVersionResource, narrow func(*metav1.ListOptions),
	store cache.ReflectorStore) {
	at := c.client.Resource(resource).Namespace(c.namespace)
	health := &apiHealth{c: c, resource: resource, now: map[string]string{}}
	pace := rate.NewLimiter(c.pace, apiBurst)
	ways := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			if err := pace.Wait(ctx); err != nil {
				return nil, err
			}
			ctx, cancel := context.WithTimeout(ctx, apiLimit)
			defer cancel()
			narrow(&options)
			list, err := at.List(ctx, options)
			health.heard(ctx, "list", options, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			if err := pace.Wait(ctx); err != nil {
				return nil, err
			}
			narrow(&options)
			changes, err := at.Watch(ctx, options)
			health.heard(ctx, "watch", options, err)
			return changes, err
		},
	}
	var silent klog.Logger // relevant errors are logged here
	reflector := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(ways, c.client), &unstructured.Unstructured{}, store,
		cache.ReflectorOptions{Logger: &silent, Name: resource.Resource, Backoff: &c.backoff})
	reflector.RunWithContext(klog.NewContext(ctx, silent))
}

// apiHealth logs whether the API server answers.
type apiHealth struct {
	c        *cluster
	resource schema.GroupVersionResource

	mu  sync.Mutex        // guards now
	now map[string]string // errors, by verb
}

// heard notes the result of a request.
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
			h.c.log.Info(h.c.what+": the API server is reachable again", "resource", h.resource.Resource)
		}
	case errors.Is(context.Cause(ctx), context.Canceled): // no longer needed
	case apierrors.IsResourceExpired(err), apierrors.IsGone(err): // all is listed again
	// an older server: it is asked for a list
	case options.SendInitialEvents != nil && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)):
	default:
		text := h.c.plainAPI(err, h.resource).Error()
		if !slices.Contains(slices.Collect(maps.Values(h.now)), text) {
			h.c.log.Warn(h.c.what+": "+text+"; "+h.c.kept, "resource", h.resource.Resource)
		}
		h.now[verb] = text
	}
}

// store is a reflector's store of the kept part of each object.
type store[T any] struct {
	c   *cluster
	of  func(*unstructured.Unstructured) T
	all map[string]T // by name; nil: not known yet. Guarded by c.mu
}

func newStore[T any](c *cluster, of func(*unstructured.Unstructured) T) *store[T] {
	return &store[T]{c: c, of: of}
}

// change changes the objects, and wakes the reader.
func (s *store[T]) change(change func()) error {
	s.c.mu.Lock()
	change()
	s.c.mu.Unlock()
	s.c.wake()
	return nil
}

// Add records a new object.
func (s *store[T]) Add(object any) error {
	u, ok := object.(*unstructured.Unstructured)
	if !ok {
		return fmt.Errorf("%T is not an API object", object)
	}
	return s.change(func() {
		if s.all == nil {
			s.all = map[string]T{}
		}
		s.all[u.GetName()] = s.of(u)
	})
}

// Update records a changed object.
func (s *store[T]) Update(object any) error { return s.Add(object) }

// Delete removes an object.
func (s *store[T]) Delete(object any) error {
	u, ok := object.(*unstructured.Unstructured)
	if !ok {
		return fmt.Errorf("%T is not an API object", object)
	}
	return s.change(func() { delete(s.all, u.GetName()) })
}

// Replace replaces all objects.
func (s *store[T]) Replace(objects []any, _ string) error {
	all := make(map[string]T, len(objects))
	for _, object := range objects {
		if u, ok := object.(*unstructured.Unstructured); ok {
			all[u.GetName()] = s.of(u)
		}
	}
	return s.change(func() { s.all = all })
}

// Resync does nothing: nothing gets lost.
func (s *store[T]) Resync() error { return nil }
