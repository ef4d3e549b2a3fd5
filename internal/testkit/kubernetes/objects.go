package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
)

// Resources that the package itself uses.
var (
	podResource     = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	accountResource = schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}
)

// DryRun creates each object of a YAML stream with a server-side dry run, which checks
// admission, defaults, schema, and unknown or duplicate fields. The default namespace is
// default. Namespaces and resource definitions must exist. The error names each refused
// object with the reason.
func (c *Cluster) DryRun(stream []byte) error {
	return c.post(stream, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict})
}

// Create creates the objects of a YAML stream. The test ends if one is refused.
func (c *Cluster) Create(stream string) {
	c.t.Helper()
	if err := c.post([]byte(stream), metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}); err != nil {
		c.t.Fatal(err)
	}
}

// post creates each object of a YAML stream.
func (c *Cluster) post(stream []byte, options metav1.CreateOptions) (err error) {
	found := 0
	for decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(stream), 4096); ; {
		var raw runtime.RawExtension
		if failure := decoder.Decode(&raw); errors.Is(failure, io.EOF) {
			break
		} else if failure != nil {
			return errors.Join(err, failure)
		}
		if text := bytes.TrimSpace(raw.Raw); len(text) == 0 || bytes.Equal(text, []byte("null")) { // a comment alone
			continue
		}
		found++
		object := &unstructured.Unstructured{}
		if failure := object.UnmarshalJSON(raw.Raw); failure != nil {
			err = errors.Join(err, fmt.Errorf("object %d: %w", found, failure))
			continue
		}
		if failure := c.postObject(object, options); failure != nil {
			err = errors.Join(err, fmt.Errorf("%s %s: %w", object.GetKind(), object.GetName(), failure))
		}
	}
	if found == 0 && err == nil {
		return errors.New("there is no object")
	}
	return err
}

func (c *Cluster) postObject(object *unstructured.Unstructured, options metav1.CreateOptions) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), callLimit)
	defer cancel()
	at, err := c.resourceOf(ctx, object)
	if err != nil {
		return err
	}
	_, err = at.Create(ctx, object, options)
	return err
}

// resourceOf finds the resource of a kind by API discovery.
func (c *Cluster) resourceOf(ctx context.Context, object *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	kind := object.GroupVersionKind()
	path := "/apis/" + kind.GroupVersion().String()
	if kind.Group == "" {
		path = "/api/" + kind.Version
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := c.web.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	var list metav1.APIResourceList
	if err := json.NewDecoder(response.Body).Decode(&list); err != nil && response.StatusCode == http.StatusOK {
		return nil, err
	}
	for _, r := range list.APIResources {
		if r.Kind != kind.Kind || bytes.ContainsRune([]byte(r.Name), '/') {
			continue
		}
		at := c.Client.Resource(kind.GroupVersion().WithResource(r.Name))
		if !r.Namespaced {
			return at, nil
		}
		namespace := object.GetNamespace()
		if namespace == "" {
			namespace = metav1.NamespaceDefault
		}
		return at.Namespace(namespace), nil
	}
	return nil, fmt.Errorf("the API server knows no %s of %s (%s)", kind.Kind, kind.GroupVersion(), response.Status)
}

// Patch changes an object by a JSON merge patch. The test ends if that is refused.
func (c *Cluster) Patch(resource schema.GroupVersionResource, namespace, name, patch string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), callLimit)
	defer cancel()
	if _, err := c.Client.Resource(resource).Namespace(namespace).Patch(ctx, name, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// Token returns a token of a ServiceAccount, valid for one hour.
func (c *Cluster) Token(namespace, account string) string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), callLimit)
	defer cancel()
	request := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": map[string]any{"name": account}, "spec": map[string]any{},
	}}
	answer, err := c.Client.Resource(accountResource).Namespace(namespace).Create(ctx, request, metav1.CreateOptions{}, "token")
	if err != nil {
		c.t.Fatal(err)
	}
	token, _, _ := unstructured.NestedString(answer.Object, "status", "token")
	return token
}
