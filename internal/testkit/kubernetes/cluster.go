// Package kubernetes is a Kubernetes control plane for tests: etcd, kube-apiserver and
// kube-controller-manager are real processes on loopback. The kubelet is the test's own:
// its containers are mock workers.
package kubernetes

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"kvrouter/internal/testkit"
)

// Folder is the environment variable that names the folder of kube-apiserver and
// kube-controller-manager. scripts/kubernetes.sh builds them and prints its name.
const Folder = "KVROUTER_KUBERNETES"

// Time limits.
const (
	startLimit = 60 * time.Second // for the API server to be ready
	callLimit  = 10 * time.Second // for one of its answers
)

// Cluster is a running control plane, which is stopped at the end of the test.
type Cluster struct {
	URL    string            // of the API server
	Client dynamic.Interface // with all rights

	t           testing.TB
	dir         string // of logs, data, keys
	certificate []byte // of the API server, which vouches for itself; PEM
	admin       string // token with all rights
	web         *http.Client
	etcd        string // its URL
	api         *program
	controllers *program
}

// Start starts etcd and the API server, and waits until the API server is ready. The test
// is skipped unless the environment variable Folder is set.
func Start(t testing.TB) *Cluster {
	t.Helper()
	if os.Getenv(Folder) == "" {
		t.Skip("make test-kubernetes runs it")
	}
	ports := testkit.FreePorts(t, 3)
	url := func(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", ports+i) }
	c := &Cluster{URL: fmt.Sprintf("https://127.0.0.1:%d", ports+2), t: t, dir: t.TempDir(), admin: rand.Text(), etcd: url(0)}
	t.Cleanup(c.showLogs)
	c.run("etcd", "--data-dir=etcd", "--unsafe-no-fsync", "--listen-client-urls="+url(0), "--advertise-client-urls="+url(0),
		"--listen-peer-urls="+url(1), "--initial-advertise-peer-urls="+url(1), "--initial-cluster=default="+url(1))
	c.identify()
	if err := os.WriteFile(c.path("tokens.csv"), fmt.Appendf(nil, "%s,admin,admin,\"system:masters\"\n", c.admin), 0o600); err != nil {
		t.Fatal(err)
	}
	config := &rest.Config{Host: c.URL, BearerToken: c.admin, TLSClientConfig: rest.TLSClientConfig{CAData: c.certificate}, QPS: -1}
	var err error
	if c.web, err = rest.HTTPClientFor(config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.web.CloseIdleConnections)
	if c.Client, err = dynamic.NewForConfigAndClient(config, c.web); err != nil {
		t.Fatal(err)
	}
	c.StartAPI()
	return c
}

func (c *Cluster) path(name string) string { return filepath.Join(c.dir, name) }

// identify creates the key and the certificate of the API server. The same key signs the
// tokens of ServiceAccounts.
func (c *Cluster) identify() {
	c.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		c.t.Fatal(err)
	}
	about := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kube-apiserver"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	certificate, err := x509.CreateCertificate(rand.Reader, about, about, &key.PublicKey, key)
	if err != nil {
		c.t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		c.t.Fatal(err)
	}
	c.certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})
	for name, content := range map[string][]byte{"api.crt": c.certificate,
		"api.key": pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})} {
		if err := os.WriteFile(c.path(name), content, 0o600); err != nil {
			c.t.Fatal(err)
		}
	}
}

// StartAPI starts the API server, also after KillAPI, and waits until it is ready.
func (c *Cluster) StartAPI() {
	c.t.Helper()
	c.api = c.run("kube-apiserver", "--etcd-servers="+c.etcd, "--bind-address=127.0.0.1", "--secure-port="+c.URL[len("https://127.0.0.1:"):],
		"--tls-cert-file=api.crt", "--tls-private-key-file=api.key", "--cert-dir=.", "--token-auth-file=tokens.csv", "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=api.key",
		"--service-account-signing-key-file=api.key",
		"--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none",
		"--disable-admission-plugins=ServiceAccount", // no controller here makes the accounts that Pods would get
	)
	testkit.Eventually(c.t, startLimit, "the API server is ready", func() bool {
		select {
		case <-c.api.ended:
			c.t.Fatal("kube-apiserver has ended")
		default:
		}
		ctx, cancel := context.WithTimeout(c.t.Context(), callLimit)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+"/readyz", nil)
		if err != nil {
			c.t.Fatal(err)
		}
		response, err := c.web.Do(request)
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
}

// KillAPI kills the API server with SIGKILL.
func (c *Cluster) KillAPI() { c.api.kill() }

// StartControllers starts the controllers of Deployments and ReplicaSets. A second call
// restarts them: running controllers wait long before they retry an API server that was
// unavailable.
func (c *Cluster) StartControllers() {
	c.t.Helper()
	if c.controllers != nil {
		c.controllers.kill()
	}
	c.controllers = c.run("kube-controller-manager", "--kubeconfig="+c.Kubeconfig("default", c.admin),
		"--controllers=deployment-controller,replicaset-controller",
		"--leader-elect=false", "--secure-port=0", "--kube-api-qps=200", "--kube-api-burst=400")
}

// Kubeconfig writes a KUBECONFIG file with the token and the namespace.
func (c *Cluster) Kubeconfig(namespace, token string) (path string) {
	c.t.Helper()
	config := api.NewConfig()
	config.Clusters["test"] = &api.Cluster{Server: c.URL, CertificateAuthorityData: c.certificate}
	config.AuthInfos["test"] = &api.AuthInfo{Token: token}
	config.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: "test", Namespace: namespace}
	config.CurrentContext = "test"
	file, err := os.CreateTemp(c.dir, "kubeconfig-")
	if err != nil {
		c.t.Fatal(err)
	}
	_ = file.Close()
	if err := clientcmd.WriteToFile(*config, file.Name()); err != nil {
		c.t.Fatal(err)
	}
	return file.Name()
}

// program is a process of the control plane.
type program struct {
	command *exec.Cmd
	ended   chan struct{} // closed once it has
}

// run starts a program in the cluster's folder. It is stopped at the end of the test at
// the latest.
func (c *Cluster) run(name string, args ...string) *program {
	c.t.Helper()
	path := filepath.Join(os.Getenv(Folder), name)
	if name == "etcd" { // the system's
		path = name
	}
	log, err := os.OpenFile(c.path(name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	p := &program{command: exec.Command(path, args...), ended: make(chan struct{})}
	p.command.Dir, p.command.Stdout, p.command.Stderr = c.dir, log, log
	p.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.command.Start(); err != nil {
		c.t.Fatalf("%v; make test-kubernetes installs it", err)
	}
	go func() { // ends with the process
		_ = p.command.Wait()
		close(p.ended)
	}()
	c.t.Cleanup(p.kill)
	return p
}

// kill kills the process and waits for its end.
func (p *program) kill() {
	_ = p.command.Process.Kill()
	<-p.ended
}

// showLogs prints the last log lines of the programs if the test has failed.
func (c *Cluster) showLogs() {
	if !c.t.Failed() {
		return
	}
	logs, _ := filepath.Glob(c.path("*.log"))
	for _, path := range logs {
		text, err := os.ReadFile(path)
		c.t.Logf("end of %s (%v):\n%s", filepath.Base(path), err, text[max(0, len(text)-3000):])
	}
}
