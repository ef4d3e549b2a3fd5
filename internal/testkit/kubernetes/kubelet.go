package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

const (
	nodeName = "node"
	// pause is the wait before the kubelet retries a failed request.
	pause = 100 * time.Millisecond
)

// Kubelet is a Node of the test, and its scheduler: each Pod gets an address 127.0.0.N
// of its own, a worker runs there, and the Pod is Ready once that answers /health. A Pod
// with a deletionTimestamp stays Ready: its preStop pause (lifecycle.preStop.sleep)
// passes, its worker is stopped, and then, at the latest after
// terminationGracePeriodSeconds, the Pod is deleted.
type Kubelet struct {
	t       testing.TB
	c       *Cluster
	start   Starter
	ctx     context.Context // ends with the test
	running sync.WaitGroup

	mu    sync.Mutex // guards the rest
	pods  map[types.UID]*Pod
	seen  int // Pods so far
	ended []Ended
}

// Starter starts a worker at an address. env is that of the Pod's container.
type Starter func(address string, env map[string]string) (*Worker, error)

// Pod is a Pod that runs on the Node.
type Pod struct {
	Namespace, Name, Address string

	uid     types.UID
	spec    *unstructured.Unstructured
	deleted time.Time     // when the deletionTimestamp was received. Guarded by Kubelet.mu
	ending  chan struct{} // closed then
}

// Ended is a deleted Pod with the report of its worker.
type Ended struct {
	Name string
	Told time.Time // when the kubelet received its deletionTimestamp
	Report
}

// StartKubelet registers the Node and runs Pods until the test ends.
func StartKubelet(t testing.TB, c *Cluster, start Starter) *Kubelet {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	k := &Kubelet{t: t, c: c, start: start, ctx: ctx, pods: map[types.UID]*Pod{}}
	c.Create("{apiVersion: v1, kind: Node, metadata: {name: " + nodeName + "}}")
	k.running.Go(k.follow)
	t.Cleanup(func() {
		cancel()
		k.running.Wait()
	})
	return k
}

// Pods returns the running Pods.
func (k *Kubelet) Pods() (all []Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range k.pods {
		all = append(all, *p)
	}
	return all
}

// Ended returns the Pods deleted so far.
func (k *Kubelet) Ended() []Ended {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]Ended(nil), k.ended...)
}

// follow lists and watches all Pods until the test ends.
func (k *Kubelet) follow() {
	at := k.c.Client.Resource(podResource)
	for k.ctx.Err() == nil {
		list, err := at.List(k.ctx, metav1.ListOptions{})
		if err == nil {
			for i := range list.Items {
				k.see(&list.Items[i])
			}
			var changes watch.Interface
			if changes, err = at.Watch(k.ctx, metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}); err == nil {
				for change := range changes.ResultChan() {
					if pod, ok := change.Object.(*unstructured.Unstructured); ok && (change.Type == watch.Added || change.Type == watch.Modified) {
						k.see(pod)
					}
				}
				changes.Stop()
			}
		}
		k.rest()
	}
}

// rest waits for pause and reports whether the test still runs.
func (k *Kubelet) rest() bool {
	select {
	case <-k.ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}

// see handles a change of a Pod.
func (k *Kubelet) see(u *unstructured.Unstructured) {
	now := time.Now()
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.pods[u.GetUID()]
	if p == nil {
		for _, gone := range k.ended {
			if gone.uid == u.GetUID() {
				return
			}
		}
		k.seen++
		p = &Pod{
			Namespace: u.GetNamespace(), Name: u.GetName(), Address: fmt.Sprintf("127.0.%d.%d", k.seen/250, 2+k.seen%250),
			uid: u.GetUID(), spec: u, ending: make(chan struct{}),
		}
		k.pods[p.uid] = p
		k.running.Go(func() { k.run(p) })
	}
	if u.GetDeletionTimestamp() != nil && p.deleted.IsZero() {
		p.deleted = now
		close(p.ending)
	}
}

// run is the lifecycle of a Pod.
func (k *Kubelet) run(p *Pod) {
	var report Report
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.pods, p.uid)
		report.uid = p.uid
		k.ended = append(k.ended, Ended{p.Name, p.deleted, report})
	}()
	at := k.c.Client.Resource(podResource).Namespace(p.Namespace)
	binding := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Binding", "metadata": map[string]any{"name": p.Name},
		"target": map[string]any{"apiVersion": "v1", "kind": "Node", "name": nodeName},
	}}
	if !k.insist(func(ctx context.Context) error {
		_, err := at.Create(ctx, binding, metav1.CreateOptions{}, "binding")
		return err
	}) {
		return
	}
	worker, err := k.start(p.Address, p.env())
	if err != nil {
		k.t.Errorf("pod %s: %v", p.Name, err)
		return
	}
	defer func() { report = worker.over() }()
	ready := p.status()
	if k.answers(p, worker) && k.insist(func(ctx context.Context) error {
		_, err := at.Patch(ctx, p.Name, types.MergePatchType, ready, metav1.PatchOptions{}, "status")
		return err
	}) {
		k.end(p, worker)
	}
	now := int64(0)
	k.insist(func(ctx context.Context) error {
		return at.Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &p.uid}})
	})
}

// end waits for the deletion of the Pod and stops its worker.
func (k *Kubelet) end(p *Pod, worker *Worker) {
	select {
	case <-p.ending:
	case <-k.ctx.Done():
		return
	}
	preStop := time.NewTimer(p.preStop())
	defer preStop.Stop()
	select {
	case <-preStop.C:
	case <-k.ctx.Done():
		return
	}
	worker.Stop()
	grace := time.NewTimer(p.grace())
	defer grace.Stop()
	select {
	case <-worker.Ended:
	case <-grace.C:
		k.t.Errorf("pod %s: its worker is killed after %s", p.Name, p.grace())
	case <-k.ctx.Done():
	}
}

// answers waits until the worker answers /health; false: the Pod is deleted before.
func (k *Kubelet) answers(p *Pod, worker *Worker) bool {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: callLimit}
	for {
		response, err := client.Get(worker.URL + "/health")
		if err == nil {
			_ = response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return true
			}
		}
		select {
		case <-p.ending:
			return false
		case <-worker.Ended:
			k.t.Errorf("pod %s: its worker has ended", p.Name)
			return false
		default:
		}
		if !k.rest() {
			return false
		}
	}
}

// insist repeats a call while the API server is unavailable. It reports whether the call
// succeeded, which it does not once the Pod is deleted.
func (k *Kubelet) insist(call func(ctx context.Context) error) bool {
	for {
		ctx, cancel := context.WithTimeout(k.ctx, callLimit)
		err := call(ctx)
		cancel()
		switch {
		case err == nil:
			return true
		case apierrors.IsNotFound(err), apierrors.IsConflict(err):
			return false
		case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsForbidden(err):
			k.t.Error(err)
			return false
		}
		if !k.rest() {
			return false
		}
	}
}

// container returns the Pod's first container.
func (p *Pod) container() map[string]any {
	all, _, _ := unstructured.NestedSlice(p.spec.Object, "spec", "containers")
	for _, one := range all {
		container, _ := one.(map[string]any)
		return container
	}
	return nil
}

// env is the environment of the Pod's container.
func (p *Pod) env() map[string]string {
	env := map[string]string{}
	list, _, _ := unstructured.NestedSlice(p.container(), "env")
	for _, one := range list {
		variable, _ := one.(map[string]any)
		name, _ := variable["name"].(string)
		env[name], _ = variable["value"].(string)
	}
	return env
}

func (p *Pod) preStop() time.Duration {
	seconds, _, _ := unstructured.NestedInt64(p.container(), "lifecycle", "preStop", "sleep", "seconds")
	return time.Duration(seconds) * time.Second
}

func (p *Pod) grace() time.Duration {
	seconds, _, _ := unstructured.NestedInt64(p.spec.Object, "spec", "terminationGracePeriodSeconds")
	return time.Duration(seconds) * time.Second
}

// status is the status that the kubelet patches into the Pod once its worker answers.
func (p *Pod) status() []byte {
	now := metav1.Now().UTC().Format(time.RFC3339)
	var conditions []any
	for _, kind := range []string{"PodScheduled", "Initialized", "ContainersReady", "Ready"} {
		conditions = append(conditions, map[string]any{"type": kind, "status": "True", "lastTransitionTime": now})
	}
	text, err := json.Marshal(map[string]any{"status": map[string]any{
		"phase": "Running", "podIP": p.Address, "podIPs": []any{map[string]any{"ip": p.Address}}, "startTime": now, "conditions": conditions,
	}})
	if err != nil {
		panic(err) // cannot happen: all values can be encoded as JSON
	}
	return text
}
